"""Finds the fastest schedule within a budget, among what the solvers propose.

The solvers only propose: every schedule is judged by the simulator, on the peak that counts. A grid of the proposals is judged for
every graph, more of them where a budget asks for it, and the best are then changed run by run (`improvement.py`) until they use all
of the budget.

Op times are measured, and differ a little from one planner to the next. Which budgets are feasible must not: the minimum that one
planner names has to work in the next. So it comes from proposals that count ops instead of timing them, equal for equal graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from rockmate.costs import Costs, perturbed_times, unit_times
from rockmate.graph import Graph
from rockmate.improvement import make_room, spend_room
from rockmate.proposals import ScheduleMaker
from rockmate.schedule import Schedule, no_recomputation
from rockmate.simulate import Simulation, simulate

_GRID_POINTS = 12  # of each family, evaluated for every graph
_TIGHTEST_POINTS = 4  # at the tight end, where simulated peaks do not follow the solver's budget closely
_BEYOND = 1  # members tried above the largest that fits
_MAX_STARTS = 3  # tried in turn until one can be made to fit
_TIGHT = 1.5  # times the minimum, below which it matters where improvement starts
_TIGHT_STARTS = 6  # improved then
_NEAR, _RATHER_NEAR = 5e-5, 5e-3  # to the bound, of the time of no recomputation: ends the search; ends it with the grid
_NOT_FAR = 1e-2  # likewise, within which improvement neither begins far above the budget nor goes there and back
_LOOSE = 1.2  # times the minimum, above which it does: nearer to that, it gains nothing and takes long
_THERE_AND_BACK = (1.1, 1.2, 1.35, 1.5, 1.8)  # times the budget
_DRAWS, _DRAWN_RUNS, _IN_VAIN = 40, 30_000, 14  # of prices; ops in all schedules made by them; in a row that gain nothing and end it
_SPREADS = (0.2, 0.5, 1.0)  # of the logarithm of prices
_MAX_EXCESS = 1.5  # peak over budget, of those
_ATTEMPTS = 2  # at making room: the estimate of bytes in use can be off
_LARGEST_SHRINKAGE, _SMALLEST_SHRINKAGE = 0.06, 0.03  # of the peak, in one step towards the smallest
FRONTIER_POINTS = 17  # of the curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule with the simulator's verdict on it.

    Attributes:
        schedule: the schedule.
        simulation: its peak and time.
        is_proved: False where a solver stopped at its time limit on the way to this very schedule, or answered for a smaller budget.
    """

    schedule: Schedule
    simulation: Simulation
    is_proved: bool = True


def evenly(low: int, high: int, num_points: int) -> list[int]:
    """Budgets from `low` to `high`, both included."""
    return [low + (high - low) * step // (num_points - 1) for step in range(num_points)]


def falling(budgets: Sequence[int], best_within: Callable[[int], Candidate | None]) -> list[tuple[int, Candidate]]:
    """Growing budgets and the best within them, less those whose time is no shorter than that of a smaller one."""
    points: list[tuple[int, Candidate]] = []
    for budget_bytes in budgets:
        best = best_within(budget_bytes)
        if best is not None and (not points or best.simulation.time_ms < points[-1][1].simulation.time_ms):
            points.append((budget_bytes, best))
    return points


def _by_time(candidate: Candidate) -> tuple[float, int]:
    return candidate.simulation.time_ms, candidate.simulation.peak_bytes


def _by_peak(candidate: Candidate) -> tuple[int, float]:
    return candidate.simulation.peak_bytes, candidate.simulation.time_ms


def _by_peak_and_length(candidate: Candidate) -> tuple[int, int]:
    return candidate.simulation.peak_bytes, len(candidate.schedule.steps)


def _spread(length: int, num_points: int) -> list[int]:
    """Indices below `length`, both ends among them, evenly spread."""
    if length <= num_points:
        return list(range(length))
    return [round(point * (length - 1) / (num_points - 1)) for point in range(num_points)]


def _fitting(members: Sequence[Candidate], budget_bytes: int) -> list[Candidate]:
    """Members within the budget, the fastest first."""
    return sorted((c for c in members if c.simulation.peak_bytes <= budget_bytes), key=_by_time)


def _above(members: Sequence[Candidate], budget_bytes: int) -> list[Candidate]:
    """Members that exceed the budget, by half of it at most, in order."""
    return sorted((c for c in members if budget_bytes < c.simulation.peak_bytes <= _MAX_EXCESS * budget_bytes), key=_by_peak)


def _far_above(members: Sequence[Candidate], budget_bytes: int) -> list[Candidate]:
    """Members that exceed the budget by more than half of it, in order."""
    return sorted((c for c in members if c.simulation.peak_bytes > _MAX_EXCESS * budget_bytes), key=_by_peak)


class _Family:
    """Schedules in order of growing solver budget, of which a grid is evaluated at once and more when a budget asks for it."""

    def __init__(self, makers: Sequence[ScheduleMaker], evaluate: Callable[[Schedule], Candidate]) -> None:
        self._makers = makers
        self._evaluate = evaluate
        self._made: dict[int, Candidate] = {}
        self._grid = sorted({*_spread(len(makers), _GRID_POINTS), *range(min(_TIGHTEST_POINTS, len(makers)))})

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


class Searcher(Protocol):
    """What finds a schedule for a budget."""

    num_unproved: int

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
    """The choice among families of schedules for a budget."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        families: Sequence[Sequence[ScheduleMaker]],
        *,
        smallest: Sequence[ScheduleMaker] | None = None,
        improves: bool = False,
        bound_ms: Callable[[int], float] | None = None,
        num_unproved: int = 0,
    ) -> None:
        """Judges a grid of every family.

        Args:
            graph: ops and storages.
            costs: of its ops.
            families: schedules in order of growing solver budget.
            smallest: where given, the smallest peak is sought among these alone.
            improves: whether schedules are changed run by run to suit the budget.
            bound_ms: a time that no schedule of so many bytes beats; where given, a schedule that is near enough ends the search.
            num_unproved: how many solves behind the families stopped early.
        """
        self.graph = graph
        self.costs = costs
        self.num_unproved = num_unproved
        self.baseline = self._evaluate(no_recomputation(graph))
        self._improves = improves
        self._bound_ms = bound_ms
        self._families = [_Family(makers, self._evaluate) for makers in families]
        grid = [self.baseline, *(candidate for family in self._families for candidate in family.grid())]
        self._minimum = min(grid, key=_by_peak)
        if smallest is not None:
            made = [self.baseline, *map(self._made, smallest)]
            grid += [*made, *self._shrunk(min(made, key=_by_peak_and_length))]
            self._minimum = grid[-1]
        self.grid = [c for c in [self._minimum, *grid] if c.simulation.peak_bytes >= self._minimum.simulation.peak_bytes]

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule found whose simulated peak is at most `budget_bytes`; None if that is below the minimum.

        The answer depends on the budget alone, not on what was asked before.
        """
        if budget_bytes < self._minimum.simulation.peak_bytes:
            return None
        best = _fitting(self.grid, budget_bytes)[0]
        for near, starts in self._starts(budget_bytes):
            if self._is_near_bound(best, budget_bytes, near):
                break
            improved = self._first_improved(starts, budget_bytes, best.simulation.time_ms)
            best = best if improved is None else min(best, improved, key=_by_time)
        return self._by_drawn_prices(self._there_and_back(best, budget_bytes), budget_bytes)

    def _there_and_back(self, best: Candidate, budget_bytes: int) -> Candidate:
        """What comes of `best` when it is given more room than there is and then made to fit again, until that gains nothing."""
        while self._is_loose(budget_bytes) and not self._is_near_bound(best, budget_bytes, _NOT_FAR):
            before = best
            for factor in _THERE_AND_BACK:
                best = self._and_back(self._roomy(best, int(factor * budget_bytes), self.costs), budget_bytes, self.costs, best)
            if best is before:
                return best
        return best

    def _by_drawn_prices(self, best: Candidate, budget_bytes: int) -> Candidate:
        """Likewise, and from no recomputation, by prices that are drawn around the true ones.

        Improvement is greedy, so what fits tightly depends on an order that a small error changes. The draws are the same at every call.
        """
        draw, in_vain = Random(0), 0
        num_draws = min(_DRAWS, _DRAWN_RUNS // max(len(self.graph.ops), 1)) if self._improves else 0
        for number in range(num_draws):
            if in_vain == _IN_VAIN or self._is_near_bound(best, budget_bytes, _NOT_FAR):
                break
            prices = perturbed_times(self.costs, draw.choice(_SPREADS), draw)
            roomy_bytes = int(draw.choice(_THERE_AND_BACK) * budget_bytes)
            start = self._roomy(best, roomy_bytes, prices) if number % 2 else self.baseline
            before, best = best, self._and_back(start, budget_bytes, prices, best)
            in_vain = 0 if best is not before else in_vain + 1
        return best

    def _roomy(self, candidate: Candidate, budget_bytes: int, prices: Costs) -> Candidate:
        return self._evaluate(spend_room(self.graph, prices, candidate.schedule, candidate.simulation, budget_bytes))

    def _and_back(self, roomy: Candidate, budget_bytes: int, prices: Costs, best: Candidate) -> Candidate:
        """The faster of `best` and what comes of `roomy`."""
        back = self._improve(roomy, budget_bytes, prices)
        return best if back is None else min(best, back, key=_by_time)

    def _is_near_bound(self, candidate: Candidate, budget_bytes: int, near: float) -> bool:
        least_ms = self.baseline.simulation.time_ms
        if self._bound_ms is None or candidate.simulation.time_ms <= least_ms:
            return candidate.simulation.time_ms <= least_ms
        return candidate.simulation.time_ms <= self._bound_ms(budget_bytes) + near * least_ms

    def _starts(self, budget_bytes: int) -> Iterator[tuple[float, list[Candidate]]]:
        """Groups of schedules to improve, each with how near to the bound makes it not worth it.

        Of a group, the first that can be made to fit counts.

        Members of the grid come first: making others takes as long as improving them, and seldom gains as much.
        """
        for family in self._families:
            yield _NEAR, _above(family.grid(), budget_bytes)[:1]
        yield _NEAR, _fitting(self.grid, budget_bytes)[:1]
        yield _RATHER_NEAR, []
        around = [family.around(budget_bytes) for family in self._families]
        yield _RATHER_NEAR, _fitting([candidate for members in around for candidate in members], budget_bytes)[:1]
        for family, members in zip(self._families, around, strict=True):
            above = _above([*family.grid(), *members], budget_bytes)
            yield _RATHER_NEAR, above[:_MAX_STARTS]
            if budget_bytes < _TIGHT * self._minimum.simulation.peak_bytes:
                yield from ((_RATHER_NEAR, [above[index]]) for index in _spread(len(above), _TIGHT_STARTS)[1:])
        # Where branches run side by side, no family knows what is in use: evicting all the way down then beats what it proposes.
        for family in self._families if self._is_loose(budget_bytes) else ():
            yield from ((_NOT_FAR, [start]) for start in _far_above(family.grid(), budget_bytes))

    def _is_loose(self, budget_bytes: int) -> bool:
        """Whether it pays to improve schedules that are far from the budget."""
        return self._improves and budget_bytes > _LOOSE * self._minimum.simulation.peak_bytes

    def frontier(self) -> list[tuple[int, Candidate]]:
        """Budgets and the best within them: growing budgets, falling times."""
        low, high = self._minimum.simulation.peak_bytes, self.baseline.simulation.peak_bytes
        if self._improves:
            budgets = evenly(low, high, FRONTIER_POINTS)
        else:
            budgets = sorted({candidate.simulation.peak_bytes for candidate in self.grid})
        return falling(budgets, self.best_within)

    def minimum(self) -> Candidate:
        """The schedule of the smallest peak."""
        return self._minimum

    def _shrunk(self, candidate: Candidate) -> list[Candidate]:
        """`candidate` and what becomes of it as values are evicted for as long as that lowers its peak; counts ops instead of time."""
        counted = unit_times(self.costs)
        found = [candidate]
        share = _LARGEST_SHRINKAGE
        while share >= _SMALLEST_SHRINKAGE:
            smaller = self._made_to_fit(found[-1], int(found[-1].simulation.peak_bytes * (1 - share)), counted)
            if smaller is None:
                share /= 2
            else:
                found.append(smaller)
        return found

    def _first_improved(self, starts: Sequence[Candidate], budget_bytes: int, known_ms: float) -> Candidate | None:
        """What comes of the first of `starts` that can be made to fit, None if none can.

        Making room takes time, so a start that does not fit and takes no less than `known_ms` is left out.
        """
        for start in starts:
            if start.simulation.peak_bytes <= budget_bytes or start.simulation.time_ms < known_ms:
                improved = self._improve(start, budget_bytes)
                if improved is not None:
                    return improved
        return None

    def _improve(self, candidate: Candidate, budget_bytes: int, prices: Costs | None = None) -> Candidate | None:
        """What comes of `candidate` when it is made to fit and then to use all the room; None if it cannot be made to fit.

        Which values go and which runs are dropped is chosen by `prices`, where given, in place of the costs.
        """
        if not self._improves:
            return candidate if candidate.simulation.peak_bytes <= budget_bytes else None
        prices = self.costs if prices is None else prices
        fitting = self._made_to_fit(candidate, budget_bytes, prices)
        if fitting is None:
            return None
        full = self._evaluate(spend_room(self.graph, prices, fitting.schedule, fitting.simulation, budget_bytes))
        fits = full.simulation.peak_bytes <= budget_bytes
        return min(fitting, full, key=_by_time) if fits else fitting

    def _made_to_fit(self, candidate: Candidate, budget_bytes: int, costs: Costs) -> Candidate | None:
        for _ in range(_ATTEMPTS):
            if candidate.simulation.peak_bytes <= budget_bytes:
                return candidate
            schedule = make_room(self.graph, costs, candidate.schedule, candidate.simulation, budget_bytes)
            if schedule is None:
                return None
            candidate = self._evaluate(schedule)
        return candidate if candidate.simulation.peak_bytes <= budget_bytes else None

    def _made(self, maker: ScheduleMaker) -> Candidate:
        return self._evaluate(maker())

    def _evaluate(self, schedule: Schedule) -> Candidate:
        return Candidate(schedule=schedule, simulation=simulate(self.graph, schedule, self.costs))
