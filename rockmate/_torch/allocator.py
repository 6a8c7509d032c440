"""Measures allocations while a function runs, from the allocator's own events.

On CPU the legacy autograd profiler reports each allocation and release in order. On CUDA the
counters of the caching allocator serve, which are public. Neither sees scratch memory that oneDNN
or MKL take from elsewhere.

The legacy profiler is fragile: its configuration is positional, and PyTorch has announced its
removal. `docs/reference/private_interfaces.md` names the way out, and why it is not taken yet.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import (
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig,
    _RecordFunctionFast,
)

from rockmate._torch.cuda import make_workspaces
from rockmate._torch.engine import is_profiling
from rockmate._torch.pytree import tree_leaves
from rockmate._util import gc_paused
from rockmate.errors import RockmateError

CUDA_BLOCK_BYTES = 512
# Of CUDA's caching allocator: from here on, a block is cut from a segment of its own; segments are
# multiples of the second; a rest up to the third stays with its block.
_LARGE_BYTES, _SEGMENT_BYTES, _MOST_REST_BYTES = 10 << 20, 2 << 20, 1 << 20

# A profiler label. Events count from the moment it is entered.
_MARK = "rockmate: measured from here"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed.

    The allocator of the CPU, cuBLAS and cuDNN raise a plain `RuntimeError`, which only its text
    tells from others.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = (
        "DefaultCPUAllocator", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def block_bytes(num_bytes: int, multiple: int) -> int:
    """The size of the block that an allocator gives for `num_bytes`.

    Multiples of 512 bytes are those of CUDA's caching allocator. It takes large blocks from the
    device in multiples of 2 MiB, and of those it splits off no rest of up to 1 MiB, unless
    PYTORCH_CUDA_ALLOC_CONF says `expandable_segments:True`.
    """
    size = -(-num_bytes // multiple) * multiple
    if multiple != CUDA_BLOCK_BYTES or size < _LARGE_BYTES or _has_expandable_segments():
        return size
    whole = -(-size // _SEGMENT_BYTES) * _SEGMENT_BYTES
    return whole if whole - size <= _MOST_REST_BYTES else size


def _has_expandable_segments() -> bool:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = ",".join(os.environ.get(name, "") for name in names).replace(" ", "").lower()
    return "expandable_segments:true" in settings


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated before an allocation fails; None if there is no limit.

    On the CPU the limit is that of the process's addresses (`ulimit -v`). What the whole machine,
    or a container, has is none: a process beyond that is killed, and no allocation fails.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with open("/proc/self/statm", encoding="ascii") as file:
        return limit - int(file.read().split()[0]) * resource.getpagesize()


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
    of the result beyond its elements. `prepare` returns the function and its arguments, which it
    allocates.
    """
    with _recorded(device) as recording:
        function, arguments = prepare()
        recording.mark()
        result = function(*arguments)
        recording.mark()
    _, during, after = recording.stop()
    return during.peak_bytes - after.begin_bytes + _padding_bytes(result)


def net_allocated(function: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Bytes that a function leaves allocated, its result included, and the result."""
    with _recorded(device) as recording:
        result = function()
        recording.mark()
    return recording.stop()[-1].begin_bytes, result


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
    refuse_profiler()
    with gc_paused():  # what older objects release would count as released here
        _enable_profiler_legacy(_profiler_config())
        try:
            result = function()
        finally:
            events = _events_of_all_threads()
    del result
    points, marks, live = [(0.0, 0)], {}, 0
    for seconds, event in events:
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage()
            points.append((seconds, live))
        elif event.kind() == "push":
            marks.setdefault(event.name(), seconds)
    return Timeline(points=points, marks=marks, duration_s=events[-1][0])


@dataclass(frozen=True, slots=True)
class Stretch:
    """Live bytes between two marks, in excess of those when the recording began.

    Attributes:
        begin_bytes: at the first mark.
        peak_bytes: the largest number.
    """

    begin_bytes: int
    peak_bytes: int


class Recording:
    """Allocations of one device, from its creation to `stop`, in stretches between marks.

    On the CPU the legacy profiler is on meanwhile, in this thread, and only this one can stop it.
    One recording runs at a time.

    Attributes:
        is_known: whether the largest peak is known. On CUDA a recording that leaves something out
            is one of a script's own step, whose statistics stay as they are: then only a peak above
            all since the script has reset them is known.
    """

    _present: ClassVar[weakref.ref[Recording] | None] = None
    # Threads whose recording was ended by another one. Numbers of threads come again.
    _left_on: ClassVar[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()

    def __init__(self, device: torch.device, *, leaves_out: bool = False) -> None:
        """Begins with the first stretch; ends a recording that was left."""
        self.end_present()
        self._leaves_out = leaves_out
        Recording._present = weakref.ref(self)
        self._device = device
        self._stretches: list[Stretch] = []
        self._num_marks = 0
        self._uncounted: dict[int, int] = {}  # number of a stretch -> bytes from it on
        self._is_stopped = False
        self._thread = threading.current_thread()
        self.is_known = not leaves_out or device.type == "cpu"
        if device.type == "cuda":
            make_workspaces(device)  # which would count
            self._origin_bytes = torch.cuda.memory_allocated(device)
            self._begin_bytes = self._origin_bytes
            self._known_bytes = torch.cuda.max_memory_allocated(device)
            if not leaves_out:
                torch.cuda.reset_peak_memory_stats(device)
        else:
            if self._thread in Recording._left_on and is_profiling():
                _disable_profiler_legacy()
            Recording._left_on.discard(self._thread)
            _enable_profiler_legacy(_profiler_config())

    @property
    def can_stop(self) -> bool:
        """Whether this thread can end it and knows what was recorded."""
        return self._device.type == "cuda" or self._thread is threading.current_thread()

    def mark(self) -> int:
        """Ends a stretch and begins the next; returns the number of the new one."""
        self._num_marks += 1
        if self._is_stopped:
            return self._num_marks
        if self._device.type == "cuda":
            self._end_stretch_cuda()
        else:
            with _RecordFunctionFast(_MARK):  # no op that the user's modes would see
                pass
        return self._num_marks

    @classmethod
    def leave_out(cls, num_bytes: int) -> None:
        """Of what is live from here on, so much does not count in a recording that leaves out."""
        present = cls._present and cls._present()
        if present is not None and present._leaves_out:
            present._uncounted[present.mark()] = num_bytes

    def stop(self) -> list[Stretch]:
        """Ends the recording; all stretches, none if it began in another thread."""
        if not self._is_stopped:
            self._stop()
            less = 0
            for number, each in enumerate(self._stretches):
                less += self._uncounted.get(number, 0)
                self._stretches[number] = Stretch(each.begin_bytes - less, each.peak_bytes - less)
        return self._stretches

    def _stop(self) -> None:
        self._is_stopped, Recording._present = True, None
        if not self.can_stop:
            Recording._left_on.add(self._thread)
            return
        if self._device.type == "cuda":
            self._end_stretch_cuda()
            return
        live = begin = peak = 0
        for _, event in _events_of_all_threads():
            if event.kind() == "memory_alloc":
                live += event.cpu_memory_usage()
                peak = max(peak, live)
            elif event.kind() == "push" and event.name() == _MARK:
                self._stretches.append(Stretch(begin, peak))
                begin = peak = live
        self._stretches.append(Stretch(begin, peak))

    @staticmethod
    def end_present() -> None:
        """Ends the present recording, if there is one."""
        present = Recording._present and Recording._present()
        if present is not None:
            present.stop()

    @staticmethod
    def is_under_way() -> bool:
        """Whether the profiler that is on in this thread is one of a recording."""
        present = Recording._present and Recording._present()
        return present is not None and present.can_stop

    def __del__(self) -> None:
        """Leaves no profiler on."""
        self.stop()

    def _end_stretch_cuda(self) -> None:
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        begin_bytes = self._begin_bytes
        self._begin_bytes = torch.cuda.memory_allocated(self._device)
        if not self._leaves_out:
            torch.cuda.reset_peak_memory_stats(self._device)
        elif peak_bytes > self._known_bytes:
            self._known_bytes, self.is_known = peak_bytes, True
        else:
            peak_bytes = max(begin_bytes, self._begin_bytes)
        origin = self._origin_bytes
        self._stretches.append(Stretch(begin_bytes - origin, peak_bytes - origin))


@contextmanager
def _recorded(device: torch.device) -> Iterator[Recording]:
    """What runs within; ended where it fails, too."""
    refuse_profiler()
    recording = Recording(device)
    try:
        yield recording
    finally:
        recording.stop()


def refuse_profiler() -> None:
    """Ends a present recording; raises `RockmateError` if somebody else's profiler is on."""
    Recording.end_present()  # of a step in frames whose script has done nothing since
    if is_profiling():
        msg = (
            "a profiler is running, and planning needs PyTorch's own to measure allocations. "
            "Plan before you start it."
        )
        raise RockmateError(msg)


def _profiler_config() -> ProfilerConfig:
    # In order: state, report_input_shapes, profile_memory, with_stack, with_flops, with_modules.
    return ProfilerConfig(
        ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()
    )


def _events_of_all_threads() -> list[tuple[float, Any]]:
    """Ends the profiler; its events in order, each with the seconds since the start."""
    events = [event for thread in _disable_profiler_legacy() for event in thread]
    start = next(event for event in events if event.name() == "__start_profile")
    timed = ((start.cpu_elapsed_us(event) / 1e6, event) for event in events)
    return sorted(timed, key=itemgetter(0))
