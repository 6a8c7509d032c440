"""Finds the fastest schedule within a budget, among what the solvers propose.

The solvers only propose: every schedule is judged by the simulator, on the peak that counts. A grid of the proposals is judged for
every graph, more of them where a budget asks for it.

Op times are measured, and differ a little from one planner to the next. Which budgets are feasible must not: the minimum that one
planner names has to work in the next. So it comes from proposals that count ops instead of timing them, equal for equal graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rockmate.costs import Costs, unit_times
from rockmate.graph import Graph
from rockmate.partition import BlockChain
from rockmate.proposals import Proposals, ScheduleMaker
from rockmate.schedule import Schedule, no_recomputation
from rockmate.simulate import Simulation, simulate

_GRID_POINTS = 24  # of each family, evaluated for every graph
_BEYOND = 6  # members tried above the largest that fits
_TIGHTEST_POINTS = 8  # at the tight end, where simulated peaks do not follow the solver's budget closely


def _spread(length: int, num_points: int) -> list[int]:
    """Indices below `length`, both ends among them, evenly spread."""
    if length <= num_points:
        return list(range(length))
    return [round(point * (length - 1) / (num_points - 1)) for point in range(num_points)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule with the simulator's verdict on it."""

    schedule: Schedule
    simulation: Simulation

    @property
    def rank(self) -> tuple[float, int]:
        """Order of preference: time first, then peak."""
        return self.simulation.time_ms, self.simulation.peak_bytes


class _Family:
    """Schedules in order of growing solver budget, of which a grid is evaluated at once and more when a budget asks for it."""

    def __init__(self, makers: Sequence[ScheduleMaker], grid: Iterable[int], evaluate: Callable[[Schedule], Candidate]) -> None:
        self._makers = makers
        self._evaluate = evaluate
        self._made: dict[int, Candidate] = {}
        self._grid = sorted({index for index in grid if 0 <= index < len(makers)})

    def __getitem__(self, index: int) -> Candidate:
        if index not in self._made:
            self._made[index] = self._evaluate(self._makers[index]())
        return self._made[index]

    def grid(self) -> list[Candidate]:
        """The members that every budget may choose among."""
        return [self[index] for index in self._grid]

    def around(self, budget_bytes: int) -> list[Candidate]:
        """Members between the last of the grid that fits and the next: simulated peaks nearly grow with the solver's budget."""
        fitting = [place for place, index in enumerate(self._grid) if self[index].simulation.peak_bytes <= budget_bytes]
        if not fitting or fitting[-1] + 1 == len(self._grid):
            return []
        low, high = self._grid[fitting[-1]], self._grid[fitting[-1] + 1]
        visited = []
        while high - low > 1:
            middle = (low + high) // 2
            visited.append(self[middle])
            if visited[-1].simulation.peak_bytes <= budget_bytes:
                low = middle
            else:
                high = middle
        return [*visited, *(self[index] for index in range(low + 1, min(low + 1 + _BEYOND, len(self._makers))))]


class Search:
    """All that is solved once for a graph, and the choice among it for a budget."""

    def __init__(self, graph: Graph, chain: BlockChain, costs: Costs, *, time_limit_s: float = 30.0) -> None:
        """Solves for all budgets; arguments as for `Proposals`."""
        self.graph = graph
        self.chain = chain
        self.costs = costs
        self.baseline = self._evaluate(no_recomputation(graph))
        max_bytes = self.baseline.simulation.peak_bytes
        self.proposals = Proposals(graph, chain, costs, max_bytes=max_bytes, time_limit_s=time_limit_s)
        counted = Proposals(graph, chain, unit_times(costs), max_bytes=max_bytes, time_limit_s=time_limit_s)
        self.num_unproved = self.proposals.solver.num_unproved + counted.solver.num_unproved
        self._families = [self._family(self.proposals.one_level()), self._family(self.proposals.several_levels())]
        single = [self._evaluate(make()) for make in counted.one_level()[:_TIGHTEST_POINTS]]
        smallest = [self.baseline, *single, *self._family(counted.several_levels()).grid()]
        self._minimum = min(smallest, key=lambda candidate: (candidate.simulation.peak_bytes, candidate.simulation.time_ms))
        grid = [*smallest, *(candidate for family in self._families for candidate in family.grid())]
        self.grid = [c for c in grid if c.simulation.peak_bytes >= self._minimum.simulation.peak_bytes]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule found whose simulated peak is at most `budget_bytes`; None if that is below the minimum.

        The answer depends on the budget alone, not on what was asked before.
        """
        if budget_bytes < self._minimum.simulation.peak_bytes:
            return None
        known = [*self.grid, *(candidate for family in self._families for candidate in family.around(budget_bytes))]
        fitting = [candidate for candidate in known if candidate.simulation.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda candidate: candidate.rank)

    def frontier(self) -> list[Candidate]:
        """Schedules of growing peak and falling time, none of them beaten by another of the grid."""
        best: list[Candidate] = []
        for candidate in sorted(self.grid, key=lambda candidate: (candidate.simulation.peak_bytes, candidate.simulation.time_ms)):
            if not best or candidate.simulation.time_ms < best[-1].simulation.time_ms:
                best.append(candidate)
        return best

    def minimum(self) -> Candidate:
        """The schedule of the smallest peak, which does not depend on measured times, and the least time found at that peak."""
        return self.frontier()[0]

    def _family(self, makers: Sequence[ScheduleMaker]) -> _Family:
        grid = [*range(_TIGHTEST_POINTS), *_spread(len(makers), _GRID_POINTS)]
        return _Family(makers, grid, self._evaluate)

    def _evaluate(self, schedule: Schedule) -> Candidate:
        return Candidate(schedule=schedule, simulation=simulate(self.graph, schedule, self.costs))
