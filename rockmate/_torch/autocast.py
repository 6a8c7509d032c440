"""Autocast: off while captured ops run, whose casts are in the graph, and what it has cast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional as F

from rockmate._torch.members import parametrizations_afresh

_switched_off = ContextVar[Mapping[str, torch.dtype] | None]("autocast", default=None)
_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
"""Number of dimensions of a weight -> op that autocast casts it for."""


def autocast_off() -> contextlib.AbstractContextManager[None]:
    """Runs ops as they were captured, where the user's autocast would cast their operands again.

    Costs nothing where autocast is off.
    """
    dtypes = autocast_dtypes()
    return _off(dtypes) if dtypes else contextlib.nullcontext()


@contextlib.contextmanager
def _off(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    token = _switched_off.set(dtypes)
    try:
        with autocast_as({}):
            yield
    finally:
        _switched_off.reset(token)


def autocast_around() -> contextlib.AbstractContextManager[None]:
    """Runs within `autocast_off` with the autocast of the user's that is on around it."""
    return autocast_as(_switched_off.get() or autocast_dtypes())


def autocast_dtypes() -> dict[str, torch.dtype]:
    """Kind of device -> dtype of autocast, for each kind on which it is on."""
    is_on = torch.is_autocast_enabled
    if not (is_on("cpu") or is_on("cuda")):  # as in most training calls, each of which asks
        return {}
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if is_on(kind)}


@contextlib.contextmanager
def autocast_as(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Runs with autocast on for these kinds of devices and off for others."""
    with contextlib.ExitStack() as stack:
        for kind in autocast_dtypes().keys() - dtypes.keys():
            stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in dtypes.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


@contextlib.contextmanager
def autocast_uncached() -> Iterator[None]:
    """Has nothing that is computed of parameters be kept: no casts, no parametrizations."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with parametrizations_afresh():
            yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def cached_cast(parameter: torch.Tensor) -> torch.Tensor:
    """The cast of a trained parameter that autocast keeps for all ops until its context ends.

    Autocast makes it for the first op, and adds up gradients in it. It is read from the node of an
    op of no elements, since PyTorch has no function that returns it. The parameter is in float32,
    of 1 to 5 dimensions, on a device on which autocast is on.
    """
    dtype = torch.get_autocast_dtype(parameter.device.type)
    num_dims = parameter.dim()
    num_columns = parameter.shape[1:] if num_dims in _CONVOLUTIONS else parameter.shape[:1]
    no_rows = parameter.new_empty((0, *num_columns), dtype=dtype, requires_grad=True)
    node: Any = _CONVOLUTIONS.get(num_dims, torch.matmul)(no_rows, parameter).grad_fn
    for name in ("_saved_weight", "_saved_mat2", "_saved_vec"):
        if hasattr(node, name):
            return getattr(node, name)
    msg = f"{node} of PyTorch {torch.__version__} does not tell the cast that it has saved"
    raise AssertionError(msg)
