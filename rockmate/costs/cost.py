"""TODO: costs.cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rockmate._arrays import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one run of an op costs.

    Attributes:
        time_ms: at the first run that of adding its gradients to `.grad` included, at another that of keeping what it needs.
        overhead_bytes: allocated while it runs, beyond its inputs and its results; below 0 where it releases what it reads before it has
            made all of its results.
    """

    time_ms: float
    overhead_bytes: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of each op of a graph, by `Op.index`: at its first run, and when recomputed (which may be another call)."""

    first: tuple[Cost, ...]
    recompute: tuple[Cost, ...]
    num_distinct: int

    @cached_property
    def first_table(self) -> tuple[Floats, Ints]:
        """Milliseconds and overhead bytes of each op's first run."""
        return _table(self.first)

    @cached_property
    def recompute_table(self) -> tuple[Floats, Ints]:
        """Milliseconds and overhead bytes of each op when recomputed."""
        return _table(self.recompute)


def _table(costs: Sequence[Cost]) -> tuple[Floats, Ints]:
    times_ms = np.array([cost.time_ms for cost in costs], dtype=np.float64)
    return times_ms, np.array([cost.overhead_bytes for cost in costs], dtype=np.int64)


def unit_times(costs: Costs) -> Costs:
    """The same overheads with one millisecond for every op: a table that no clock has had a hand in."""
    first, recompute = (
        tuple(replace(cost, time_ms=1.0) for cost in table)
        for table in (costs.first, costs.recompute)
    )
    return Costs(first=first, recompute=recompute, num_distinct=costs.num_distinct)
