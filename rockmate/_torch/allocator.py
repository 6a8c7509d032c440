"""Measures allocations while a function runs, from the allocator's own events.

On CPU the legacy autograd profiler reports each allocation and release in order. The public
`torch.profiler` reports them too, but writes to standard error and costs tens of milliseconds a
session. On CUDA the counters of the caching allocator serve, which are public.

Neither sees scratch memory that oneDNN or MKL take from elsewhere. The legacy profiler is fragile:
its configuration is positional, and PyTorch has announced its removal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from rockmate._torch.pytree import tree_leaves

# A profiler label. Events count from the moment it is entered.
_MARK = "rockmate: measured from here"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed.

    The allocator of the CPU, cuBLAS and cuDNN raise a plain `RuntimeError`, which only its text
    tells from others.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    allocators = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(name in str(error) for name in allocators)


def peak_beyond_result(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes by which the peak during `function` exceeds the elements of its result.

    The function must leave nothing allocated but its result.
    """
    return workspace_bytes(lambda: (function, ()), device)


def workspace_bytes(
    prepare: Callable[[], tuple[Callable[..., Any], Sequence[Any]]], device: torch.device
) -> int:
    """Bytes by which the peak during a function exceeds what it leaves allocated.

    Both are relative to the state before the call. Arguments that the function releases therefore
    add to the result: they lower what is left, not the peak. Padding counts as well, that is memory
    of the result beyond its elements.

    Args:
        prepare: returns the function and its arguments, which it allocates.
        device: where the function runs.
    """
    if device.type == "cuda":
        return _peak_beyond_rest_cuda(prepare, device)
    # The arguments live until here, so that their release is no event of the function.
    (result, _), threads = _record(lambda: _after_mark(prepare))
    live = peak = 0
    for thread in threads:
        is_after = False
        for event in thread:
            if event.kind() == "push" and event.name() == _MARK:
                is_after = True
            elif event.kind() == "memory_alloc" and is_after:
                live += event.cpu_memory_usage()
                peak = max(peak, live)
    return peak - live + _padding_bytes(result)


def net_allocated(function: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Bytes that a function leaves allocated, its result included, and the result."""
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
        + _padding_bytes(result)
    )


def _padding_bytes(result: Any) -> int:
    """Bytes of scalar results beyond their one element.

    A reduced loss is one number in a storage as large as what was reduced.
    """
    leaves = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
    scalars = [tensor for tensor in leaves if tensor.numel() == 1]
    return sum(scalar.untyped_storage().nbytes() - scalar.element_size() for scalar in scalars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The CPU allocator's live bytes while a function ran.

    Attributes:
        points: after each allocation and release, in order: seconds since the start, and bytes
            allocated in excess of those at the start.
        marks: name of a `torch.profiler.record_function` range -> seconds at its first entry.
        duration_s: seconds from start to end, recording included.
    """

    points: Sequence[tuple[float, int]]
    marks: Mapping[str, float]
    duration_s: float

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes in `points`."""
        return max((live for _, live in self.points), default=0)


def timeline(function: Callable[[], Any]) -> Timeline:
    """Records every allocation and release of `function` on the CPU.

    The size of a release is right for memory that `function` allocates itself. Run `function` once
    beforehand, so that caches are filled and older allocations are released.
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
    # In order: state, report_input_shapes, profile_memory, with_stack, with_flops, with_modules.
    config = ProfilerConfig(
        ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()
    )
    _enable_profiler_legacy(config)
    try:
        result = function()
    finally:
        threads = _disable_profiler_legacy()
    return result, threads
