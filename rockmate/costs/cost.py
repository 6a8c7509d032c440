"""The cost of each op: time and workspace, for its first run and for a recomputation.

This is the interface of all cost models. `measure_costs` fills it from runs on the device,
`estimate_costs` from the description of a machine. Schedules, bounds and solvers read it and know
neither. Costs are independent of each other and of the order of the ops: the time of a schedule is
the sum over its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rockmate._util import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time and workspace of one run of an op.

    Attributes:
        time_ms: milliseconds. A first run includes the addition of its gradients to `.grad`, a
            recomputation includes the time to save the state that it replays.
        overhead_bytes: bytes allocated while the op runs, beyond its inputs and its results.
            Negative if the op releases an input before it has allocated all of its results.
    """

    time_ms: float
    overhead_bytes: int


class CostArrays(NamedTuple):
    """The same costs as arrays over `Op.index`."""

    time_ms: Floats
    overhead_bytes: Ints


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of all ops of a graph.

    Attributes:
        first: cost of each op's first run, by `Op.index`.
        recompute: cost of each op's recomputation, by `Op.index`; it may be another call.
        num_distinct: number of distinct calls behind these costs.
        link: rates of copies to another memory tier; None if nothing may move.
    """

    first: tuple[Cost, ...]
    recompute: tuple[Cost, ...]
    num_distinct: int
    link: Link | None = None

    @cached_property
    def first_arrays(self) -> CostArrays:
        """`first` as arrays."""
        return _arrays_of(self.first)

    @cached_property
    def recompute_arrays(self) -> CostArrays:
        """`recompute` as arrays."""
        return _arrays_of(self.recompute)


def unit_times(costs: Costs) -> Costs:
    """The same workspaces with a time of 1 ms for every run.

    A search that must not depend on measured times uses these: the same graph then gives the same
    answer on every machine.
    """
    first, recompute = (
        tuple(replace(cost, time_ms=1.0) for cost in table)
        for table in (costs.first, costs.recompute)
    )
    return Costs(first=first, recompute=recompute, num_distinct=costs.num_distinct)


def scaled_times(costs: Costs, factor: float) -> Costs:
    """The same costs with the time of every run multiplied by a factor."""
    first, recompute = (
        tuple(replace(cost, time_ms=factor * cost.time_ms) for cost in table)
        for table in (costs.first, costs.recompute)
    )
    return replace(costs, first=first, recompute=recompute)


def scaled_recompute_times(costs: Costs, factors: Floats) -> Costs:
    """The same costs with the time of each recomputation multiplied by a factor, by `Op.index`."""
    scaled = tuple(
        replace(cost, time_ms=cost.time_ms * factor)
        for cost, factor in zip(costs.recompute, factors.tolist(), strict=True)
    )
    return replace(costs, recompute=scaled)


def _arrays_of(costs: Sequence[Cost]) -> CostArrays:
    return CostArrays(
        time_ms=np.array([cost.time_ms for cost in costs], dtype=np.float64),
        overhead_bytes=np.array([cost.overhead_bytes for cost in costs], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Rates of copies between the device's memory and another tier.

    Attributes:
        out_gb_per_s: of a copy out, in 1e9 bytes a second.
        in_gb_per_s: of a copy back.
        latency_ms: of each copy, beside its bytes.
        duplex: share of its rate that each direction keeps while both copy.
        has_one_lane: whether copies of both directions wait for each other, in one queue.
        slowdown: factor by which ops take longer while something is copied.
    """

    out_gb_per_s: float
    in_gb_per_s: float
    latency_ms: float
    duplex: float = 1.0
    has_one_lane: bool = False
    slowdown: float = 1.0

    def out_ms(self, num_bytes: int) -> float:
        """Time of a copy out by itself."""
        return self.latency_ms + num_bytes / (self.out_gb_per_s * 1e6)

    def in_ms(self, num_bytes: int) -> float:
        """Time of a copy back by itself."""
        return self.latency_ms + num_bytes / (self.in_gb_per_s * 1e6)
