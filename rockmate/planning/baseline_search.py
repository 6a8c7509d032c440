"""The search of the strategies to compare with: the fastest schedule of a family, as it is.

Solvers propose schedules, the simulator judges each by its peak. Nothing is repaired or refined.
`Searcher` is the interface of all searches.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt
from typing import Protocol

from rockmate.costs.cost import Costs
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph
from rockmate.planning.candidate import Candidate, by_peak, evaluate, feasible
from rockmate.planning.lowering import lower_sequence
from rockmate.schedule.schedule import Schedule, baseline_schedule
from rotor import Step


class Searcher(Protocol):
    """A search for the fastest schedule within any budget."""

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule found with a simulated peak of at most `budget_bytes`.

        None if the budget is below the minimum.
        """
        ...

    def minimum(self) -> Candidate:
        """The candidate with the smallest peak."""
        ...


class FamilySearch:
    """The choice among the baseline and the schedules of a family, none of them changed."""

    def __init__(self, graph: Graph, costs: Costs, family: Iterable[Schedule]) -> None:
        schedules = (baseline_schedule(graph), *family)
        self._candidates = [evaluate(graph, schedule, costs) for schedule in schedules]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """See `Searcher`."""
        return next(iter(feasible(self._candidates, budget_bytes)), None)

    def minimum(self) -> Candidate:
        """See `Searcher`."""
        return min(self._candidates, key=by_peak)


def chen_schedule(graph: Graph, chain: BlockChain) -> Schedule:
    """The schedule of Chen et al.: saves one boundary in every sqrt(n) blocks, recomputes the rest.

    "Training Deep Nets with Sublinear Memory Cost", 2016. It has no budget, and equal segments
    whatever the sizes of the blocks.
    """
    num_blocks = len(chain.blocks)
    length = isqrt(num_blocks - 1) + 1
    firsts = list(range(0, num_blocks, length))
    steps = [Step("F", stage) for stage in range(firsts[-1])]
    for first in reversed(firsts):
        segment = range(first, min(first + length, num_blocks))
        steps += [Step("K", stage) for stage in segment]
        steps += [Step("B", stage) for stage in reversed(segment)]
    return lower_sequence(graph, chain, tuple(steps))
