"""What is allocated while a function runs, from the allocator's own events.

CPU: the legacy autograd profiler reports each allocation and release in order (the newer one writes to standard error and costs
tens of milliseconds a session). CUDA: the caching allocator's counters. Scratch memory that oneDNN or MKL take from elsewhere is
not seen by either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils import _pytree as pytree

_MARK = "rockmate: measured from here"


def peak_beyond_result(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes by which the allocator's peak during `function` exceeds what the elements of its result take.

    The function's result must be the only thing that it leaves allocated.
    """
    return workspace_bytes(lambda: (function, ()), device)


def workspace_bytes(
    prepare: Callable[[], tuple[Callable[..., Any], Sequence[Any]]], device: torch.device
) -> int:
    """Bytes by which the allocator's peak during a function exceeds what it leaves allocated, all counted beyond what there was before.

    So what it releases of its arguments counts on top: the peak is as far above what is left. What its result has no numbers in counts too.

    Args:
        prepare: returns the function and its arguments, which it allocates.
        device: where the function runs.
    """
    if device.type == "cuda":
        return _peak_beyond_rest_cuda(prepare, device)
    (result, _), threads = _record(
        lambda: _after_mark(prepare)
    )  # kept until here: their release is no event of the function
    live = peak = 0
    for thread in threads:
        is_after = False
        for event in thread:
            if event.kind() == "push" and event.name() == _MARK:
                is_after = True
            elif event.kind() == "memory_alloc" and is_after:
                live += event.cpu_memory_usage()
                peak = max(peak, live)
    return peak - live + _unused_bytes(result)


def net_allocated(function: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Bytes that a function leaves allocated, its result included; and the result."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        result = function()
        return torch.cuda.memory_allocated(device) - before, result
    result, threads = _record(function)
    return sum(
        event.cpu_memory_usage()
        for thread in threads
        for event in thread
        if event.kind() == "memory_alloc"
    ), result


def _after_mark(prepare: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]) -> tuple[Any, Any]:
    function, arguments = prepare()
    with torch.profiler.record_function(_MARK):
        return function(*arguments), arguments


def _peak_beyond_rest_cuda(
    prepare: Callable[[], tuple[Callable[..., Any], Sequence[Any]]], device: torch.device
) -> int:
    function, arguments = prepare()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = function(*arguments)
    torch.cuda.synchronize(device)
    return (
        torch.cuda.max_memory_allocated(device)
        - torch.cuda.memory_allocated(device)
        + _unused_bytes(result)
    )


def _unused_bytes(result: Any) -> int:
    """Of the memory that the result's numbers stand in: a reduced loss is one number in memory as large as what was reduced."""
    numbers = [
        value
        for value in pytree.tree_leaves(result)
        if isinstance(value, torch.Tensor) and value.numel() == 1
    ]
    return sum(number.untyped_storage().nbytes() - number.element_size() for number in numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The CPU allocator's live bytes while a function ran.

    Attributes:
        points: (seconds since the start, bytes allocated beyond those at the start), after each allocation and release, in order.
        marks: name of a `torch.profiler.record_function` range -> seconds at which it was first entered.
        duration_s: seconds from start to end, recording included.
    """

    points: Sequence[tuple[float, int]]
    marks: Mapping[str, float]
    duration_s: float

    @property
    def peak_bytes(self) -> int:
        """The largest excess over what was allocated at the start."""
        return max((live for _, live in self.points), default=0)


def timeline(function: Callable[[], Any]) -> Timeline:
    """Record every allocation and release of `function` on the CPU.

    The sizes of releases are right for what `function` allocates itself; run it once beforehand, so that what it makes on first
    use, and what it would release of older allocations, is settled.
    """
    result, threads = _record(function)
    del result
    events = [event for thread in threads for event in thread]
    start = next(event for event in events if event.name() == "__start_profile")
    timed = sorted(
        ((start.cpu_elapsed_us(event) / 1e6, event) for event in events), key=lambda pair: pair[0]
    )
    points, marks, live = [(0.0, 0)], {}, 0
    for seconds, event in timed:
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage()
            points.append((seconds, live))
        elif event.kind() == "push":
            marks.setdefault(event.name(), seconds)
    return Timeline(points=points, marks=marks, duration_s=timed[-1][0])


def _record(function: Callable[[], Any]) -> tuple[Any, list[list[Any]]]:
    """The function's result, and the profiler's events of each thread, in order."""
    config = ProfilerConfig(
        ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()
    )
    _enable_profiler_legacy(config)
    try:
        result = function()
    finally:
        threads = _disable_profiler_legacy()
    return result, threads
