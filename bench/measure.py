"""The meters: activation peak of one training step, step times in turn, equality of gradients.

The *activation peak* is what a budget limits: the largest excess, over one forward and backward,
above the bytes that were allocated when the forward was called, with `.grad` allocated beforehand
(`zero_grad(set_to_none=False)`). Two meters measure it. They share no code with each other, and on
the CPU none with `rockmate`, whose predictions they check:

- `allocator_peak` follows the allocator's own events. On the CPU it sums the sizes of the
  "[memory]" events of `torch.profiler`. On CUDA it reads `max_memory_allocated`. It counts exactly
  the bytes that tensors asked for, which the caching allocator of CUDA rounds to 512, and op
  workspaces that are tensors. It does not see what a library takes for itself: oneDNN and MKL
  scratch, cuDNN handles, Python objects.
- `resident_peak` reads the kernel's high-water mark of the process (`VmHWM`). It counts every
  touched page: library scratch, allocator slack, page rounding, Python objects. It does not count
  memory that was allocated and never written, nor reuse of pages that were already resident. So it
  needs `RESIDENT_ENVIRONMENT` and a process of its own.

A budget is compared with the events. The resident mark shows that no real memory escapes them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import sub, truediv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.models import Batch, Workload
from rockmate._util import gc_paused
from rockmate.curves.measure import activation_peak

Step = Callable[[], object]


# --- one training step -----------------------------------------------------------------------


def training_step(
    workload: Workload, model: Callable[..., Any], batch: Batch, *, seed: int
) -> Tensor:
    """Forward and backward of one batch from a fixed random state; returns the detached loss.

    The outputs live until the backward has ended, as in a training loop that logs them.
    """
    torch.manual_seed(seed)
    outputs, loss = workload.loss(model, batch)
    loss.backward()
    del outputs
    return loss.detach()


class Trainer:
    """Training steps of a workload, on the same batch and from the same random state each time.

    A callee is its model, or a module around that.
    """

    def __init__(self, workload: Workload, batch: Batch | None = None, *, seed: int = 1) -> None:
        """The batch is the one of the seed by default."""
        self.workload, self.seed = workload, seed
        self.batch = workload.make_batch(seed) if batch is None else batch

    def step(self, callee: Callable[..., Any]) -> Callable[[], Tensor]:
        """One step of a callee; gradients add up."""
        return partial(training_step, self.workload, callee, self.batch, seed=self.seed)

    def lent_step(self, lend: Callable[..., AbstractContextManager[Any]]) -> None:
        """One step of the callee that is lent for it."""
        with lend(self.workload) as callee:
            self.step(callee)()

    def zero(self) -> None:
        """Sets the gradients to zero, in place."""
        self.workload.model.zero_grad(set_to_none=False)

    def gradients(self, callee: Callable[..., Any]) -> dict[str, Tensor]:
        """Those of one step, by parameter name; afterwards they are zero."""
        self.zero()
        self.step(callee)()
        found = gradients_of(self.workload.model)
        self.zero()
        return found

    def peak_bytes(self, callee: Callable[..., Any]) -> int:
        """The peak of a second step, with gradients in place."""
        self.step(callee)()
        self.zero()
        return allocator_peak(self.step(callee))


# --- peak, by the allocator's events ---------------------------------------------------------


def allocator_peak(step: Step, *, device: str | torch.device = "cpu") -> int:
    """Largest excess in bytes, over one call of `step`, above what was allocated before it.

    Run the step once before, or buffers that are allocated on first use count. On the CPU, memory
    that was allocated earlier and is freed within the step is not subtracted, since its size is
    unknown there. A step that frees older tensors therefore measures high, never low.
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        return activation_peak(step, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto = profiler.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    return _largest_excess(_cpu_events(kineto.kineto_results.experimental_event_tree()))


_Event = tuple[int, int, int]
"""Time in ns, address, and bytes of an allocation, or less than 0 of a free."""


def _cpu_events(roots: Sequence[Any]) -> list[_Event]:
    # The event tree, because the flat event list has no addresses.
    events: list[_Event] = []
    pending = list(roots)
    while pending:
        node = pending.pop()
        pending.extend(node.children)
        if node.name == "[memory]" and node.extra_fields.device.type == "cpu":
            events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
    # A free and an allocation may have the same time. Frees first would read low, so allocations go
    # first. Where an address is allocated again, the caller removes the earlier bytes.
    events.sort(key=lambda event: (event[0], event[2] < 0))
    return events


def _largest_excess(events: Sequence[_Event]) -> int:
    # Frees are matched with allocations by address. Torch keeps the sizes of earlier profiled
    # allocations in a table that goes stale outside a profile, so the size of an unmatched free may
    # be wrong.
    live: dict[int, int] = {}
    total_bytes = peak_bytes = 0
    for _, address, num_bytes in events:
        total_bytes -= live.pop(address, 0)
        if num_bytes > 0:
            live[address] = num_bytes
            total_bytes += num_bytes
            peak_bytes = max(peak_bytes, total_bytes)
    return peak_bytes


# --- peak, by the kernel's high-water mark ---------------------------------------------------


RESIDENT_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The environment with which a process that reads the resident mark has to start.

Blocks of 64 KiB and more then come from the kernel and return to it one by one. Setting the same
through `mallopt` later is no substitute: the heap that grew before serves large blocks from its
holes (22 % off on a 24-layer GPT-2). Page faults cost half a step and more in such a process, so
nothing may be timed in it before `ordinary_allocation` has been called.
"""


def ordinary_allocation() -> None:
    """Ends the effect of `RESIDENT_ENVIRONMENT`, for a process that goes on to timing.

    `resident_peak` is of no use after it. The C library then allocates as in an ordinary process
    that has run for a while: blocks of up to 32 MiB come from the heap, which keeps freed blocks.
    """
    library = ctypes.CDLL("libc.so.6")
    # The C library's own threshold grows up to here.
    largest_heap_block_bytes = 32 << 20
    if not (
        library.mallopt(_M_MMAP_THRESHOLD, largest_heap_block_bytes)
        and library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    ):
        msg = (
            "the C library refused new thresholds for its heap; "
            "times of this process would be those of page faults"
        )
        raise RuntimeError(msg)


# Names and values of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def resident_peak(step: Step) -> int:
    """Largest excess in bytes, over one call of `step`, of the process's resident memory.

    Linux and CPU only, and only in a process that started with `RESIDENT_ENVIRONMENT`. Run the step
    once before, in the same process.
    """
    missing = {
        name for name in RESIDENT_ENVIRONMENT if name.startswith("MALLOC")
    } - os.environ.keys()
    if missing:
        names = ", ".join(sorted(missing))
        raise RuntimeError(f"the resident peak needs {names} set at process start")
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    # This sets the mark to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = status_bytes("VmRSS")
    step()
    return status_bytes("VmHWM") - before_bytes


def status_bytes(field: str) -> int:
    """A size of this process, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}: the resident peak needs Linux")


# --- time ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one step in all rounds, beside those of the first step in the same rounds.

    In a ratio of two steps of one round, drift of the machine's speed cancels. The median of ratios
    need not equal the ratio of the medians.
    """

    times_ms: Sequence[float]
    reference_ms: Sequence[float]

    @property
    def median_ms(self) -> float:
        """Over the rounds."""
        return statistics.median(self.times_ms)

    @property
    def ratio(self) -> float:
        """The median of the time over the first step's of the round."""
        return statistics.median(self._ratios)

    @property
    def ratio_spread(self) -> float:
        """Largest less smallest of those ratios."""
        return max(self._ratios) - min(self._ratios)

    @property
    def difference_ms(self) -> float:
        """The median of the time less the first step's of the round."""
        return statistics.median(map(sub, self.times_ms, self.reference_ms))

    @property
    def _ratios(self) -> list[float]:
        return list(map(truediv, self.times_ms, self.reference_ms))

    def over(self, other: StepTimes) -> StepTimes:
        """The same beside another step."""
        return StepTimes(self.times_ms, other.times_ms)


def time_in_turn(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    before: Step = lambda: None,
    device: str | torch.device = "cpu",
    is_wall: bool = False,
    warm_ups: int = 1,
    collects: bool = True,
    reference_every: int = 0,
) -> dict[str, StepTimes]:
    """Times the steps in turn, the order reversed in every other round; the first is the reference.

    Args:
        steps: Name to step.
        rounds: How often each is timed.
        before: Called before each step, outside its time, for example to zero the gradients.
        device: Where the steps run. A CUDA device is synchronized before and after each step.
        is_wall: Whether wall time counts; else as in `time_once`.
        warm_ups: Rounds before those that count.
        collects: Whether garbage is collected before each step, which takes longer than small ones.
        reference_every: If not 0, the reference runs before and after each so many others, which
            are held against the mean of both; its own time in a round is the median.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")

    def timed(name: str) -> float:
        # Before every step alike: a collection empties caches, which the step pays for.
        if collects:
            gc.collect()
        before()
        return time_once(steps[name], device, is_wall=is_wall)

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    with quiet():
        for number in range(-warm_ups, rounds):
            ordered = names[::-1] if number % 2 else names
            own = _round(ordered, names[0], timed, reference_every)
            for name, pair in own.items() if number >= 0 else ():
                found[name].append(pair)
    return {name: StepTimes(*zip(*pairs, strict=True)) for name, pairs in found.items()}


def _round(
    names: Sequence[str], reference: str, timed: Callable[[str], float], every: int
) -> dict[str, tuple[float, float]]:
    """One time of each step, and that of the reference beside it."""
    if not every:
        times = {name: timed(name) for name in names}
        return {name: (own, times[reference]) for name, own in times.items()}
    found, references = dict[str, tuple[float, float]](), [timed(reference)]
    others = [name for name in names if name != reference]
    for first in range(0, len(others), every):
        own = {name: timed(name) for name in others[first : first + every]}
        references.append(timed(reference))
        mean = statistics.mean(references[-2:])
        found |= {name: (time_ms, mean) for name, time_ms in own.items()}
    median = statistics.median(references)
    return found | {reference: (median, median)}


def time_once(step: Step, device: str | torch.device = "cpu", *, is_wall: bool = False) -> float:
    """Time of one call in ms: processor time on one thread of a CPU, otherwise wall time.

    On one thread the two differ by the time that other processes have taken of the core. A CUDA
    device is synchronized before and after.
    """
    device = torch.device(device)
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock_ns = time.process_time_ns if is_alone and not is_wall else time.perf_counter_ns
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_ns = clock_ns()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock_ns() - start_ns) / 1e6


@contextmanager
def quiet() -> Iterator[None]:
    """Takes one intra-op thread and pauses garbage collection; restores both."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    try:
        with gc_paused():
            yield
    finally:
        torch.set_num_threads(threads_before)


@contextmanager
def heard(level: int) -> Iterator[list[str]]:
    """Collects the lines of rockmate's log, of this level and above."""
    lines: list[str] = []
    logger, handler = logging.getLogger("rockmate"), logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


# --- equality --------------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients by parameter name; parameters without one are left out."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same names and bits."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(each, theirs[name]) for name, each in ours.items()
    )
