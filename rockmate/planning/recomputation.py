"""The recomputation of one evicted value: its runs, their time, and their peak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Op


@dataclass(eq=False)
class Recomputation:
    """The ops that have to run to compute an evicted value.

    Attributes:
        storage: index of the value.
        runs: the ops, in order.
        costs: of all ops.
    """

    storage: int
    runs: tuple[Op, ...]
    costs: Costs

    @cached_property
    def time_ms(self) -> float:
        """The time of all runs together."""
        return sum(self.costs.recompute[op.index].time_ms for op in self.runs)

    @cached_property
    def peak_bytes(self) -> int:
        """The peak of the runs one after the other; values that only they read are released."""
        runs = set(self.runs)
        last_reader = {read: op for op in self.runs for read in op.reads}
        live = peak = 0
        for op in self.runs:
            live += op.written_bytes
            peak = max(peak, live + self.costs.recompute[op.index].overhead_bytes)
            for storage in {*op.reads, *op.writes}:
                if (
                    storage.index != self.storage
                    and storage.producer in runs
                    and last_reader.get(storage, op) is op
                ):
                    live -= storage.num_bytes
        return peak
