"""The choice among families of schedules for a budget: solvers propose, the simulator judges every schedule on the peak that counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.planning.candidate import Candidate, by_peak, evaluate, feasible, nondominated
from rockmate.planning.family import Family, ScheduleMaker
from rockmate.schedule.schedule import baseline_schedule

FRONTIER_POINTS = 17  # of a curve, where every budget has a schedule of its own


class Searcher(Protocol):
    """What finds a schedule for a budget."""

    @property
    def num_unproved(self) -> int:
        """How many solves so far have stopped at their time limit."""
        ...

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule known whose simulated peak is at most `budget_bytes`; None if that is below the minimum."""
        ...

    def frontier(self) -> list[tuple[int, Candidate]]:
        """Budgets and the best within them: growing budgets, falling times."""
        ...

    def minimum(self) -> Candidate:
        """The schedule of the smallest peak."""
        ...


class Search:
    """The choice among families whose members are taken as they are."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        families: Sequence[Sequence[ScheduleMaker]],
        *,
        num_unproved: int = 0,
    ) -> None:
        """Judges a grid of every family.

        Args:
            graph: ops and storages.
            costs: of its ops.
            families: schedules in order of growing solver budget.
            num_unproved: how many solves behind the families stopped early.
        """
        self.num_unproved = num_unproved
        judged = partial(evaluate, graph, costs=costs)
        self._families = [Family(makers, judged) for makers in families]
        self._grid = [
            judged(baseline_schedule(graph)),
            *(candidate for family in self._families for candidate in family.grid()),
        ]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest member whose simulated peak is at most `budget_bytes`; None if that is below the minimum."""
        if budget_bytes < self.minimum().peak_bytes:
            return None
        near_budget = [
            candidate for family in self._families for candidate in family.near_budget(budget_bytes)
        ]
        return feasible([*self._grid, *near_budget], budget_bytes)[0]

    def frontier(self) -> list[tuple[int, Candidate]]:
        """Budgets and the best within them: growing budgets, falling times."""
        return nondominated(
            sorted({candidate.peak_bytes for candidate in self._grid}), self.best_within
        )

    def minimum(self) -> Candidate:
        """The schedule of the smallest peak."""
        return min(self._grid, key=by_peak)
