"""Autocast switched off while captured ops run: its casts are in the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


def autocast_off() -> contextlib.AbstractContextManager[None]:
    """Runs ops as they were captured, where the user's autocast would cast their operands again.

    Costs nothing where autocast is off.
    """
    enabled = autocast_dtypes()
    return _switched_off(enabled) if enabled else contextlib.nullcontext()


def autocast_dtypes() -> dict[str, torch.dtype]:
    """Kind of device -> dtype of autocast, for each kind on which it is on."""
    is_on = torch.is_autocast_enabled
    if not (is_on("cpu") or is_on("cuda")):  # as in most training calls, each of which asks
        return {}
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if is_on(kind)}


@contextlib.contextmanager
def _switched_off(device_types: Iterable[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextlib.contextmanager
def autocast_uncached() -> Iterator[None]:
    """Has autocast keep no casts of parameters, which would stay until its context ends."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
