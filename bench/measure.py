"""The meters: peak activation bytes of one training step, step times taken in turn, equality of gradients.

What is measured: the *activation peak* that a budget bounds, that is the largest excess, over one forward
and backward, above what was allocated when the forward was called, with `.grad` in place beforehand
(`zero_grad(set_to_none=False)`). Two meters that share nothing measure it:

- `allocator_peak` follows the allocator's own events. On the CPU it sums the sizes of the "[memory]" events
  of `torch.profiler`, on CUDA it reads `max_memory_allocated`. It counts exactly the bytes that tensors
  asked for (CUDA: rounded to 512 by the caching allocator), op workspaces that are tensors among them. It
  does not see what a library takes for itself: oneDNN and MKL scratch, cuDNN handles, Python objects.
- `resident_peak` reads the kernel's high-water mark of the process (`VmHWM`). It counts every touched page,
  whoever touched it: library scratch, allocator slack, page rounding, Python objects. It does not count
  memory that was allocated and never written, nor reuse of pages that were already resident: hence
  `RESIDENT_ENVIRONMENT`, and a process of its own.

The events are the figure to hold against a budget; the resident mark shows that no real memory hides from it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.models import Batch, Workload
from rockmate.collector import gc_paused
from rockmate.sweeps.measure import TensorDifference, tensor_difference

Step = Callable[[], object]


# --- one training step --------------------------------------------------------------------------------


def training_step(
    workload: Workload, model: Callable[..., Any], batch: Batch, *, seed: int
) -> Tensor:
    """Forward and backward of one batch from a fixed random state; gives the loss, detached.

    The outputs live until the backward is over, as in a training loop that logs them.
    """
    torch.manual_seed(seed)
    outputs, loss = workload.loss(model, batch)
    loss.backward()
    del outputs
    return loss.detach()


# --- peak, by the allocator's events -------------------------------------------------------------------


def allocator_peak(step: Step, *, device: str | torch.device = "cpu") -> int:
    """Largest excess in bytes, over one call of `step`, above what tensors held before it.

    Run the step once beforehand, or buffers that are made on first use count. Memory that was there before
    and is freed within the step gives nothing back on the CPU (its size is unknown there), so a step that
    drops older tensors measures high, never low.
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(step, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto = profiler.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    return _largest_excess(_cpu_events(kineto.kineto_results.experimental_event_tree()))


def _cuda_peak(step: Step, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllocatorEvent:
    time_ns: int
    address: int
    num_bytes: int  # negative where memory is freed


def _cpu_events(roots: Sequence[Any]) -> list[_AllocatorEvent]:
    # The event tree, because the flat event list carries no addresses.
    events: list[_AllocatorEvent] = []
    pending = list(roots)
    while pending:
        node = pending.pop()
        pending.extend(node.children)
        if node.name != "[memory]" or node.extra_fields.device.type != "cpu":
            continue
        fields = node.extra_fields
        events.append(
            _AllocatorEvent(
                time_ns=node.start_time_ns, address=fields.ptr, num_bytes=fields.alloc_size
            )
        )
    # A free and an allocation may share a tick; frees first would read low, so allocations go first, except
    # that an address must be free before it is given out again, which the caller sorts out.
    events.sort(key=lambda event: (event.time_ns, event.num_bytes < 0))
    return events


def _largest_excess(events: Sequence[_AllocatorEvent]) -> int:
    # Frees are matched with allocations by address: torch keeps the sizes of earlier profiled allocations in
    # a table that goes stale outside a profile, so an unmatched free may carry a size that never was.
    live: dict[int, int] = {}
    total_bytes = peak_bytes = 0
    for event in events:
        if event.num_bytes > 0:
            total_bytes += event.num_bytes - live.pop(event.address, 0)
            live[event.address] = event.num_bytes
            peak_bytes = max(peak_bytes, total_bytes)
        else:
            total_bytes -= live.pop(event.address, 0)
    return peak_bytes


# --- peak, by the kernel's high-water mark -----------------------------------------------------------


RESIDENT_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""What the process that reads the resident mark must be started with.

Blocks of 64 KiB and more then come from and go back to the kernel one by one. Setting the same through
`mallopt` later is no substitute: the heap that grew before serves large blocks from its holes (measured 22 %
off on a 24-layer GPT-2). Nothing may be timed in such a process, whose page faults cost half a step and more, before
`ordinary_allocation` has been called.
"""


def ordinary_allocation() -> None:
    """Ends what `RESIDENT_ENVIRONMENT` set, for a process that goes on to timing; `resident_peak` is of no use after it.

    The C library then allocates as a process does that was started without it and has run for a while: blocks of up to 32 MiB come from the
    heap, which keeps what is freed.
    """
    library = ctypes.CDLL("libc.so.6")
    largest_heap_block_bytes = 32 << 20  # where the C library's own, growing threshold ends
    if not (
        library.mallopt(_M_MMAP_THRESHOLD, largest_heap_block_bytes)
        and library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    ):
        raise RuntimeError(
            "the C library refused new thresholds for its heap: times taken here would be those of page faults"
        )


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def resident_peak(step: Step) -> int:
    """Largest excess in bytes, over one call of `step`, of the process's resident memory above its start.

    Linux only, CPU only, and only in a process started with `RESIDENT_ENVIRONMENT`. Run the step once
    beforehand, in the same process.
    """
    return resident_marks([step])[0]


def resident_marks(steps: Sequence[Step]) -> list[int]:
    """For each of some steps, called one after the other, the largest excess as in `resident_peak`, above the start of the first.

    What a step leaves resident, memory that it did not free or fragments that nothing fits in, is in the marks of all later ones.
    """
    missing = {
        name for name in RESIDENT_ENVIRONMENT if name.startswith("MALLOC")
    } - os.environ.keys()
    if missing:
        raise RuntimeError(
            f"the resident peak needs {', '.join(sorted(missing))} set at process start"
        )
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before_bytes, marks_bytes = None, []
    for step in steps:
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the mark starts again from what is resident now
        before_bytes = _status_bytes("VmRSS") if before_bytes is None else before_bytes
        step()
        marks_bytes.append(_status_bytes("VmHWM") - before_bytes)
    return marks_bytes


def resident_calibration(num_bytes: int = 64 << 20) -> float:
    """Measured over true resident peak of a step that fills one block of `num_bytes`: 1.0 is exact."""

    def fill() -> None:
        torch.ones(num_bytes // 4, dtype=torch.float32)

    fill()
    return resident_peak(fill) / num_bytes


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}: the resident peak needs Linux")


# --- time ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one step over all rounds, and against the first step of the same round.

    Attributes:
        median_ms: Median over the rounds.
        spread_ms: Largest minus smallest.
        ratio: Median over the rounds of this step's time over the first step's in that round. Drift of the
            machine, which moves both, cancels; it need not equal the ratio of the medians.
        ratio_spread: Largest minus smallest of those ratios.
    """

    median_ms: float
    spread_ms: float
    ratio: float
    ratio_spread: float


def time_in_turn(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    before: Step = lambda: None,
    num_threads: int = 1,
    device: str | torch.device = "cpu",
) -> dict[str, StepTimes]:
    """Times the steps in turn (A B A B ...), after one round that is not counted; the first is the reference.

    Args:
        steps: Name to step.
        rounds: How often each is timed.
        before: Called ahead of each step, outside its time (zeroing the gradients, say).
        num_threads: Intra-op threads during the timing; the setting is put back afterwards.
        device: Where the steps run; a CUDA device is waited for at both ends of each step.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    with quiet(num_threads):
        for index in range(rounds + 1):
            for name, step in steps.items():
                gc.collect()  # ahead of every step alike: it empties the caches, which the next step pays for
                before()
                elapsed_ms = time_once(step, device)
                if index:
                    times_ms[name].append(elapsed_ms)
    reference = next(iter(times_ms.values()), [])
    return {name: _summarize(own, reference) for name, own in times_ms.items()}


def time_once(step: Step, device: str | torch.device = "cpu") -> float:
    """Time of one call in milliseconds: the processor's on one thread of a CPU, else the wall clock's.

    On one thread the two differ by what other processes have taken of the core. A CUDA device is waited for at both ends.
    """
    device = torch.device(device)
    clock_ns = (
        time.process_time_ns
        if device.type == "cpu" and torch.get_num_threads() == 1
        else time.perf_counter_ns
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_ns = clock_ns()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock_ns() - start_ns) / 1e6


def _summarize(own: list[float], reference: list[float]) -> StepTimes:
    ratios = [mine / theirs for mine, theirs in zip(own, reference, strict=True)]
    return StepTimes(
        median_ms=statistics.median(own),
        spread_ms=max(own) - min(own),
        ratio=statistics.median(ratios),
        ratio_spread=max(ratios) - min(ratios),
    )


@contextmanager
def quiet(num_threads: int = 1) -> Iterator[None]:
    """So many intra-op threads and no collection of cycles inside; both are put back."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    gc.collect()
    try:
        with gc_paused():
            yield
    finally:
        torch.set_num_threads(threads_before)


# --- equality ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one training step left behind, in copies."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    random_state: Tensor


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients by parameter name; parameters without one are left out."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradient_difference(model_a: nn.Module, model_b: nn.Module) -> TensorDifference:
    """How the gradients that two models hold now differ, relative to the second's.

    Both steps must have started from the same random state, which `training_step` sees to.
    """
    return tensor_difference(_gradient_views(model_a), _gradient_views(model_b))


def _gradient_views(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def record_steps(
    workload: Workload, model: Callable[..., Any], *, num_steps: int, learning_rate: float = 1e-3
) -> list[StepRecord]:
    """Trains `num_steps` steps with plain SGD, each on its own batch, and then puts the weights back.

    The weights move between the steps, so a plan that kept a copy of a weight would show in step 2.
    """
    owner = workload.model
    before = {name: value.detach().clone() for name, value in owner.state_dict().items()}
    records = []
    for index in range(num_steps):
        owner.zero_grad(set_to_none=False)
        loss = training_step(workload, model, workload.make_batch(index + 1), seed=index + 1)
        records.append(
            StepRecord(
                loss=loss.clone(),
                gradients=gradients_of(owner),
                buffers={name: value.clone() for name, value in owner.named_buffers()},
                random_state=torch.get_rng_state(),
            )
        )
        _descend(owner, learning_rate)
    owner.load_state_dict(before)
    owner.zero_grad(set_to_none=False)
    return records


def _descend(model: nn.Module, learning_rate: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-learning_rate)
