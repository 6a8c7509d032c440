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

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from torch import nn

from bench.command import Record
from bench.measure import Step, allocator_peak, time_in_turn
from bench.models import REGISTRY, Batch, built
from bench.moves import measured
from rockmate import InfeasibleBudgetError, Plan, Planner

MODELS = ("resnet50", "resnet101")
MOST_TIME = 1.25
MACHINE, ROWS, PIXELS = "h100", 32, 224
"""Of the simulated cases."""
MEASURED_ROWS, MEASURED_PIXELS = 2, 96
_MOST_TIMES = 16


def batches(name: str, folder: str | None) -> Iterator[Record]:
    """The record of one model: simulated, or measured with a folder."""
    search = _Search(name, folder)
    rows, largest = search.rows, search.largest("rockmate")
    common = {
        "kind": "batch",
        "model": name,
        "machine_name": "" if folder else MACHINE,
        "rows": rows,
        "pixels": search.pixels,
        "memory_bytes": search.memory_bytes,
        "eager_ms": search.eager_ms,
        "largest_without_moves": search.largest("recompute"),
    }
    if folder is None:
        plan = search.plan(largest, "rockmate")
        ratio = plan.predicted_ms / largest / (search.eager_ms / rows)
        yield {**common, **_found(plan, largest), "time_ratio": ratio}
        return
    while (found := search.measured(largest))["time_ratio"] > MOST_TIME and largest > rows:
        largest -= rows
    yield {**common, **found}


def _found(plan: Plan, num_rows: int) -> Record:
    return {
        "largest": num_rows,
        "num_moves": len(plan.schedule.moves),
        "num_recomputations": plan.schedule.num_recomputations(),
        "host_bytes": plan.simulation.host_bytes,
        "peak_bytes": plan.predicted_peak_bytes,
    }


class _Search:
    """The largest multiple of eager's batch that fits and is fast enough."""

    def __init__(self, name: str, folder: str | None) -> None:
        self.rows, self.pixels = (
            (ROWS, PIXELS) if folder is None else (MEASURED_ROWS, MEASURED_PIXELS)
        )
        make = partial(REGISTRY[name], pixels=self.pixels)
        device = "meta" if folder is None else "cpu"
        self._workload = built(name, make, device=device).with_loss_inside()
        self._where: dict[str, Any] = (
            {"machine": MACHINE, "offload": "host"} if not folder else {"offload": f"disk:{folder}"}
        )
        self.planner = cache(self._planner)
        self.batch = cache(partial(self._workload.make_batch, 0))
        eager = self.planner(self.rows)
        self.eager_ms, eager_bytes = eager.baseline_ms, eager.baseline_peak_bytes
        if folder is not None:
            step = self._step(self._workload.model, self.rows)
            step()  # makes the gradients, which a step's peak does not count
            eager_bytes = allocator_peak(step)
        self.memory_bytes = eager_bytes + _num_bytes(self.batch(self.rows))

    def _planner(self, num_rows: int) -> Planner:
        """The planner at a batch."""
        return Planner(
            self._workload.model, dict(self.batch(num_rows)), outputs="loss", numerics="bitwise",
            **self._where,
        )  # fmt: skip

    def _budget(self, num_rows: int) -> int:
        return max(1, self.memory_bytes - _num_bytes(self.batch(num_rows)))

    def plan(self, num_rows: int, strategy: str) -> Plan:
        """The fastest plan at a batch."""
        return self.planner(num_rows).plan(self._budget(num_rows), strategy=strategy)

    def _is_fast(self, num_rows: int, strategy: str) -> bool:
        most_ms = MOST_TIME * self.eager_ms / self.rows * num_rows
        try:
            return self.plan(num_rows, strategy).predicted_ms <= most_ms
        except InfeasibleBudgetError:
            return False

    def largest(self, strategy: str) -> int:
        """The batch; at least eager's own."""
        low, high = 1, 2
        while high <= _MOST_TIMES and self._is_fast(high * self.rows, strategy):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self._is_fast(middle * self.rows, strategy) else (low, middle)
            )
        return low * self.rows

    def measured(self, num_rows: int) -> Record:
        """One batch, planned and trained in turn with eager's smaller one."""
        planner = self.planner(num_rows)
        module = planner.module(self._budget(num_rows), trial="never")
        ours = self._step(module, num_rows)
        ours()
        peak_bytes = allocator_peak(ours)
        steps = {"eager": self._step(self._workload.model, self.rows), "ours": ours}
        times = time_in_turn(steps, measured.NUM_ROUNDS, is_wall=True)
        return {
            **_found(module.plan, num_rows),
            "predicted_ratio": module.plan.predicted_ms / planner.baseline_ms,
            "time_ratio": times["ours"].ratio * self.rows / num_rows,
            "eager_ms": times["eager"].median_ms,
            "measured_peak_bytes": peak_bytes,
            "batch_bytes": _num_bytes(self.batch(num_rows)),
        }

    def _step(self, module: nn.Module, num_rows: int) -> Step:
        return partial(_train, module, self.batch(num_rows))


def _num_bytes(batch: Batch) -> int:
    return sum(value.nbytes for value in batch.values())


def _train(module: nn.Module, batch: Batch) -> None:
    loss, outputs = module(**batch)
    loss.backward()
    del outputs
