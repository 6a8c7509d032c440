"""The search of the strategies to compare with: the fastest member of a family, as it is.

Solvers propose schedules, the simulator judges each by its peak. Nothing is repaired or refined.
`Searcher` is the interface of all searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.planning.candidate import Candidate, by_peak, evaluate, feasible
from rockmate.planning.family import Family, ScheduleMaker
from rockmate.schedule.schedule import baseline_schedule


class Searcher(Protocol):
    """A search for the fastest schedule within any budget."""

    @property
    def num_unproved(self) -> int:
        """The number of solves that have stopped at their time limit so far."""
        ...

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule found with a simulated peak of at most `budget_bytes`.

        None if the budget is below the minimum.
        """
        ...

    def minimum(self) -> Candidate:
        """The candidate with the smallest peak."""
        ...


class FamilySearch:
    """The choice among the members of families, none of them changed.

    Args:
        graph: ops and storages.
        costs: of its ops.
        families: schedules, each family in order of growing solver budget.
        num_unproved: number of solves behind the families that stopped at their time limit.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        families: Sequence[Sequence[ScheduleMaker]],
        *,
        num_unproved: int = 0,
    ) -> None:
        self.num_unproved = num_unproved
        simulated = partial(evaluate, graph, costs=costs)
        self._families = [Family(makers, simulated) for makers in families]
        self._grid = [
            simulated(baseline_schedule(graph)),
            *(candidate for family in self._families for candidate in family.grid()),
        ]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """See `Searcher`."""
        if budget_bytes < self.minimum().peak_bytes:
            return None
        near_budget = [
            candidate for family in self._families for candidate in family.near_budget(budget_bytes)
        ]
        return feasible([*self._grid, *near_budget], budget_bytes)[0]

    def minimum(self) -> Candidate:
        """See `Searcher`."""
        return min(self._grid, key=by_peak)
