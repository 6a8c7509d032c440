"""The largest batch with moves, in the memory that eager needs for a smaller one.

The memory is that of eager's activations at batch b and of the batch itself; parameters, gradients
and the optimizer's state are the same for both. A batch counts if its step fits there and takes at
most 1.25x of eager's time a sample. Beside it stands the largest batch with recomputation alone.

*Simulated*: images of 224 pixels in single precision on a machine that is elsewhere, both times
estimated. *Measured*: small images on this machine with one thread, moves to a folder. Eager's peak
comes from the allocator's events, the batch from the planner's search, and both times are measured
in turn; if a measured time is above the limit, smaller batches are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.command import Record
from bench.measure import allocator_peak, time_in_turn
from bench.models import images
from bench.models.registry import built
from bench.moves import measured
from rockmate import InfeasibleBudgetError, Plan, Planner

MOST_TIME = 1.25
DEPTHS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
MACHINE, ROWS, PIXELS = "h100", 32, 224
"""Of the simulated cases."""
MEASURED_ROWS, MEASURED_PIXELS = 2, 96
_MOST_TIMES = 16
_Planned = Callable[[int], Planner]


def batches(name: str, folder: str | None) -> Iterator[Record]:
    """The record of one model: simulated, or measured with a folder."""
    rows, pixels = (ROWS, PIXELS) if folder is None else (MEASURED_ROWS, MEASURED_PIXELS)
    device = torch.device("meta" if folder is None else "cpu")
    make = partial(images.resnet, depths=DEPTHS[name], batch=1, pixels=32)
    workload = built(name, make, device=device).with_loss_inside()
    sample = partial(_sample, pixels=pixels, device=device)
    where: dict[str, Any] = (
        {"machine": MACHINE, "offload": "host"} if folder is None else {"offload": f"disk:{folder}"}
    )

    def planner_of(num_rows: int) -> Planner:
        return Planner(
            workload.model, sample(num_rows), outputs="loss", numerics="bitwise", **where
        )

    eager = planner_of(rows)
    eager_bytes, eager_ms = eager.baseline_peak_bytes, eager.baseline_ms
    if folder is not None:
        step = partial(_step, workload.model, sample(rows))
        step()  # makes the gradients, which a step's peak does not count
        eager_bytes = allocator_peak(step)
    memory = eager_bytes + _batch_bytes(sample(rows))
    search = _Search(planner_of, sample, memory, MOST_TIME * eager_ms / rows, rows)
    common = {
        "kind": "batch",
        "model": name,
        "machine_name": "" if folder else MACHINE,
        "rows": rows,
        "pixels": pixels,
        "memory_bytes": memory,
        "eager_ms": eager_ms,
        "largest_without_moves": search.largest("recompute"),
    }
    largest = search.largest("rockmate")
    if folder is None:
        yield {**common, **_found(search.plan(largest, "rockmate"), largest, eager_ms / rows)}
        return
    while True:
        planner = search.planner(largest)
        found = _measured(workload.model, sample, planner, memory, largest, rows)
        if found["time_ratio"] <= MOST_TIME or largest == rows:
            break
        largest -= rows
    yield {**common, **found}


class _Search:
    """The largest multiple of a batch that fits and is fast enough."""

    def __init__(
        self,
        planner_of: _Planned,
        sample: Callable[[int], dict[str, Tensor]],
        memory: int,
        most_ms: float,
        rows: int,
    ) -> None:
        self._planner_of, self._sample, self._memory = planner_of, sample, memory
        self._most_ms, self._rows = most_ms, rows
        self._planners: dict[int, Planner] = {}

    def planner(self, num_rows: int) -> Planner:
        """The planner at a batch."""
        if num_rows not in self._planners:
            self._planners[num_rows] = self._planner_of(num_rows)
        return self._planners[num_rows]

    def plan(self, num_rows: int, strategy: str) -> Plan:
        """The fastest plan at a batch."""
        budget = self._memory - _batch_bytes(self._sample(num_rows))
        return self.planner(num_rows).plan(max(1, budget), strategy=strategy)

    def _is_fast(self, num_rows: int, strategy: str) -> bool:
        try:
            return self.plan(num_rows, strategy).predicted_ms <= self._most_ms * num_rows
        except InfeasibleBudgetError:
            return False

    def largest(self, strategy: str) -> int:
        """The batch; at least eager's own."""
        low, high = 1, 2
        while high <= _MOST_TIMES and self._is_fast(high * self._rows, strategy):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self._is_fast(middle * self._rows, strategy) else (low, middle)
            )
        return low * self._rows


def _found(plan: Plan, num_rows: int, eager_row_ms: float) -> Record:
    return {
        "largest": num_rows,
        "time_ratio": plan.predicted_ms / num_rows / eager_row_ms,
        "num_moves": len(plan.schedule.moves),
        "num_recomputations": plan.schedule.num_recomputations(),
        "host_bytes": plan.simulation.host_bytes,
        "peak_bytes": plan.predicted_peak_bytes,
    }


def _measured(
    model: nn.Module,
    sample: Callable[[int], dict[str, Tensor]],
    planner: Planner,
    memory: int,
    num_rows: int,
    rows: int,
) -> Record:
    """One batch, planned and trained in turn with eager's smaller one."""
    module = planner.module(memory - _batch_bytes(sample(num_rows)), trial="never")
    ours, eager = partial(_step, module, sample(num_rows)), partial(_step, model, sample(rows))
    ours()
    peak_bytes = allocator_peak(ours)
    steps = {"eager": eager, "ours": ours}
    times = time_in_turn(steps, measured.NUM_ROUNDS, is_wall=True)
    eager_ms = times["eager"].median_ms
    return {
        **_found(module.plan, num_rows, eager_ms / rows),
        "predicted_ratio": module.plan.predicted_ms / planner.baseline_ms,
        "time_ratio": times["ours"].ratio * rows / num_rows,
        "eager_ms": eager_ms,
        "measured_peak_bytes": peak_bytes,
        "batch_bytes": _batch_bytes(sample(num_rows)),
    }


def _sample(num_rows: int, *, pixels: int, device: torch.device) -> dict[str, Tensor]:
    if device.type == "meta":
        values = torch.empty(num_rows, 3, pixels, pixels, device=device)
    else:
        generator = torch.Generator().manual_seed(num_rows)
        values = torch.randn(num_rows, 3, pixels, pixels, generator=generator)
    return {"x": values, "labels": torch.zeros(num_rows, dtype=torch.int64, device=device)}


def _batch_bytes(sample: dict[str, Tensor]) -> int:
    return sum(value.nbytes for value in sample.values())


def _step(module: nn.Module, sample: dict[str, Tensor]) -> None:
    loss, outputs = module(**sample)
    loss.backward()
    del outputs
