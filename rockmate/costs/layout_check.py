"""Layouts that a capture says, held against those that kernels give.

Autograd goes by layouts, and so does a trace on fake tensors. Where a fake result is laid out
otherwise than the kernel's, the trace lacks copies that autograd would make. So every distinct call
is run before its step is: those of the planned graph when they are measured, and those of the trace
that passes have replaced here. A difference is corrected by another capture.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch

from rockmate._torch.autocast import autocast_off
from rockmate._torch.storage import bytes_of
from rockmate.capture.roles import Drawn, TracedCall
from rockmate.costs.synthetic_inputs import synthetic_tensor
from rockmate.errors import KernelLayoutError, advise_frames
from rockmate.ops.kernel_layouts import differences, is_observed, observe
from rockmate.state.tensors import tensors_in

logger = logging.getLogger(__name__)
_Made = TypeVar("_Made")


def captured_in_kernel_layouts(make: Callable[[], _Made]) -> _Made:
    """What `make` captures and checks, once more where kernels lay out otherwise.

    Raises:
        KernelLayoutError: the capture has another layout than the kernel, though that is known.
    """
    tried = frozenset[object]()
    while True:
        try:
            return make()
        except KernelLayoutError as error:
            if error.differences <= tried:
                advise_frames(error)
                raise
            tried |= error.differences
            logger.info("captured again: %s", str(error).partition(". ")[0])


def check_traced(calls: Iterable[TracedCall], most_bytes: float = math.inf) -> None:
    """Runs the calls that have not run in this process, and compares the layouts of all.

    A call that fails on synthetic inputs, or takes more than `most_bytes`, is not compared.

    Raises:
        KernelLayoutError: as for `check_layouts`.
    """
    calls = [*calls]
    # Fake CUDA tensors may be traced on a machine without a GPU.
    can_run = torch.cuda.is_available()
    unknown = [
        each
        for each in calls
        if not is_observed(each.key)
        and can_run >= bool(each.cuda_devices)
        and sum(map(bytes_of, tensors_in((each.args, each.kwargs, each.results)))) <= most_bytes
    ]
    cuda = sorted({index for call in unknown for index in call.cuda_devices})
    with torch.random.fork_rng(devices=cuda), torch.no_grad(), autocast_off():
        for call in unknown:
            _observe_run(call)
    check_layouts((call.place, call.key, call.results) for call in calls)


def _observe_run(call: TracedCall) -> None:
    try:
        args, kwargs = _synthetic((call.args, call.kwargs))
        observe(call.key, call.target(*args, **kwargs), args)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        logger.debug("the layout of %s is not known: %s", call.place, error)


def check_layouts(calls: Iterable[tuple[str, Hashable, Any]]) -> None:
    """Compares the layouts of calls that have run: each its place, its key and its fake results.

    Raises:
        KernelLayoutError: some are others. The next capture has those of the kernels.
    """
    found = {each: place for place, key, fakes in calls for each in differences(key, fakes)}
    if found:
        (_, real, fake), place = next(iter(found.items()))
        msg = (
            f"{place} gives {real} on this device, and its fake kernel, by which "
            f"the model is captured, {fake}. Gradients could be those of other elements. Correct "
            "the fake kernel of your own op (torch.library.register_fake), or keep the submodule "
            "out of the capture (untraced=[...])."
        )
        raise KernelLayoutError(msg, frozenset(found))


def _synthetic(values: Any) -> Any:
    """Arguments with synthetic tensors in the place of fake ones, and seeds that ops return."""
    if isinstance(values, Drawn):
        args, kwargs = _synthetic((values.args, values.kwargs))
        return values.target(*args, **kwargs)[values.index]
    if isinstance(values, tuple | list):
        return type(values)(map(_synthetic, values))
    if isinstance(values, dict):
        return {key: _synthetic(each) for key, each in values.items()}
    return synthetic_tensor(values) if isinstance(values, torch.Tensor) else values
