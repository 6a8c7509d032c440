"""The recomputation of one evicted value: its runs, their time, and their peak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rockmate._util import Bools, Ints, once_for_each
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op


class RecomputeTables(NamedTuple):
    """Which values can be recomputed, and from what.

    Attributes:
        producer: index of the op that makes each storage; -1 if there is none.
        is_evictable: whether a storage takes memory and its op can be recomputed.
        inputs: for each op the values that its recomputation reads and that can be missing, each as
            a pair of storage and producer; None if the op cannot be recomputed.
    """

    producer: Ints
    is_evictable: Bools
    inputs: tuple[tuple[tuple[int, int], ...] | None, ...]


@once_for_each
def recompute_tables(graph: Graph) -> RecomputeTables:
    """Those of a graph."""
    made = [(each.producer, each.num_bytes) for each in graph.storages]
    can_run = [maker is not None and maker.is_recomputable and size for maker, size in made]
    return RecomputeTables(
        np.array([-1 if maker is None else maker.index for maker, _ in made]),
        np.array(can_run, dtype=np.bool_),
        tuple(_inputs(op) if op.is_recomputable else None for op in graph.ops),
    )


def _inputs(op: Op) -> tuple[tuple[int, int], ...]:
    return tuple((s.index, s.producer.index) for s in op.reads if s.producer and not s.is_result)


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
