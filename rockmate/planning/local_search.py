"""Finds the fastest schedule within a budget: takes what solvers propose and changes it run by run until it uses all of the budget.

Proposals are asked for in order of what they cost, and no more of them than it takes to come near the bound. Whatever they are, the
simulator judges them, and improvement (`improvement.py`) makes them fit and then use the room that is left.

Op times are measured, and differ a little from one planner to the next. Which budgets are feasible must not: the minimum that one
planner names has to work in the next. So it comes from proposals that count ops instead of timing them, equal for equal graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import ceil, inf
from typing import Protocol

from tqdm import tqdm

from rockmate.costs.cost import Costs, unit_times
from rockmate.graph.ir import Graph, Op
from rockmate.planning.baseline_search import FRONTIER_POINTS
from rockmate.planning.candidate import (
    MAX_EXCESS,
    Candidate,
    by_peak,
    by_time,
    fastest,
    feasible,
    infeasible,
    is_worth_refining,
    linspace_int,
    nondominated,
    subsample,
)
from rockmate.planning.family import Family, ScheduleMaker
from rockmate.planning.refine import ScheduleRefiner
from rockmate.planning.tightening import TighteningPath, TriedStarts
from rockmate.schedule.schedule import Schedule, baseline_schedule

# How near to the bound, of the time of no recomputation, a schedule ends ...
_NEAR = 5e-5  # ... the search
_CLOSE = 1e-3  # ... it before several levels are solved
_RATHER_NEAR = 2.5e-3  # ... it before more than a grid of them is looked at
_SOMEWHAT_NEAR = 5e-3  # ... it before runs are put off, among many budgets
_NOT_FAR = 1e-2  # ... it before anything is given room and made to fit again
_FAR = 2e-2  # ... it before more is given room, and more is brought down to the budget
_LIMITS = (
    3  # on saved bytes, tried in search of the one for which a schedule of one level just fits
)
_CLOSELY = 1e-3  # of the budget, between one that fits and one that exceeds: ends that
_MAX_STARTS = 3  # tried in turn until one can be made to fit
_TIGHT = 1.5  # times the minimum, below which it matters where improvement starts
_TIGHT_STARTS = 6  # improved then
_RUNG = 1.04  # from one budget to the next, of which the best is a start for those above, too
_STEP_UP = 1.15  # from one budget to the next, by which a schedule is raised
_TOPS = (1, 3, 6)  # such steps, after which it is lowered again
_STEP_DOWN = 1.05  # from one budget to the next, by which what recomputes nothing is brought down, with runs put off on the way
_STEPS_DOWN = (1.1, 1.15, 1.3, 1.6, 2.0, inf)  # likewise, with none put off
_BACK = (
    9  # places among many budgets, from which far from the bound a schedule is brought down as well
)
_STEPS_DOWN_OF_LONG, _TOPS_OF_LONG = (
    (1.6, 2.0),
    (3,),
)  # likewise, of a long step: all of them take too long
_LEAST_OF_MINIMUM = 0.9  # what is fastest at the minimum may need less, but seldom less than that
_MOST_RUNS_SHRUNK = 10_000  # in all schedules from which the smallest peak is sought
_LARGEST_SHRINKAGE, _SMALLEST_SHRINKAGE = (
    0.06,
    0.01,
)  # of the peak, in one step towards the smallest


class WarmStarts(Protocol):
    """What solvers propose for a graph, each solved when it is first asked for."""

    @property
    def num_unproved(self) -> int:
        """How many solves so far have stopped at their time limit."""
        ...

    def from_relaxation(self, budget_bytes: int) -> Schedule | None:
        """A schedule of the bound's own time, whose peak may exceed the budget; None if there is none."""
        ...

    def saving(self, max_saved_bytes: int) -> Schedule | None:
        """The fastest schedule that saves at most so many bytes and recomputes the rest once; None if there is none."""
        ...

    def several_levels(self) -> Sequence[ScheduleMaker]:
        """Schedules that may recompute more than once, in order of growing solver budget."""
        ...

    def smallest(self) -> Sequence[ScheduleMaker]:
        """Schedules among which the smallest peak is sought; equal for equal graphs, whatever their ops cost."""
        ...

    def bound_ms(self, budget_bytes: int) -> float:
        """A time that no schedule of so many bytes beats."""
        ...


class LocalSearch:
    """The search of the default strategy."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        proposals: WarmStarts,
        *,
        backward: Sequence[Op] | None = None,
    ) -> None:
        """Nothing is solved before it is asked for.

        Args:
            graph: ops and storages.
            costs: of its ops.
            proposals: what is improved.
            backward: late and backward ops in the order in which what recomputes nothing has them; None for the graph's.
        """
        self._costs = costs
        self._proposals = proposals
        self._improver = ScheduleRefiner(graph, costs)
        self._known: dict[int, Candidate] = {}
        self._known_first: dict[int, tuple[Candidate, Candidate]] = {}
        self._baseline = self._improver.evaluated(baseline_schedule(graph, backward))

    @property
    def num_unproved(self) -> int:
        """How many solves so far have stopped at their time limit."""
        return self._proposals.num_unproved

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule found whose simulated peak is at most `budget_bytes`; None if that is below the minimum.

        A smaller budget is met where what is fastest at the minimum happens to need no more. The answer depends on the budget alone,
        not on what was asked before.
        """
        if budget_bytes >= self.minimum().peak_bytes:
            return self._best_within(budget_bytes)
        if (
            budget_bytes < _LEAST_OF_MINIMUM * self.minimum().peak_bytes
            or self._fastest_at_minimum.peak_bytes > budget_bytes
        ):
            return None
        return self._fastest_at_minimum

    @cached_property
    def _fastest_at_minimum(self) -> Candidate:
        return self._best_within(self.minimum().peak_bytes)

    def _best_within(self, budget_bytes: int) -> Candidate:
        """The fastest of what is found for the budget and, far from the bound, of what comes of the best within a little less."""
        best = self._found_within(budget_bytes)
        if self._is_near_bound(best, budget_bytes, _FAR) or self._improver.is_long:
            return best
        return fastest(
            best,
            self._improver.improved(
                self._found_within(self._rung_below(budget_bytes)), budget_bytes
            ),
        )

    def _rung_below(self, budget_bytes: int) -> int:
        """The next smaller of the budgets that grow by one factor from the minimum on; the minimum for itself."""
        rung_bytes = next_bytes = self.minimum().peak_bytes
        while next_bytes < budget_bytes:
            rung_bytes, next_bytes = next_bytes, ceil(next_bytes * _RUNG)
        return rung_bytes

    def _found_within(self, budget_bytes: int) -> Candidate:
        if budget_bytes not in self._known:
            proposed, defer = self._first_within(budget_bytes)
            is_near = self._is_near_bound(defer, budget_bytes, _CLOSE)
            self._known[budget_bytes] = (
                defer
                if is_near
                else fastest(self._thoroughly_improved(proposed, budget_bytes), defer)
            )
        return self._known[budget_bytes]

    def first_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest found before anything is improved thoroughly, which takes most of the time; None as for `best_within`."""
        if budget_bytes < self.minimum().peak_bytes:
            return self.best_within(budget_bytes)
        return fastest(*self._first_within(budget_bytes))

    def _first_within(self, budget_bytes: int) -> tuple[Candidate, Candidate]:
        """The fastest that comes of proposals, and the fastest of these and of schedules with runs put off on the way down."""
        if budget_bytes not in self._known_first:
            best = self._improved_starts(
                feasible(self._smallest, budget_bytes)[0],
                self._of_one_level(budget_bytes),
                budget_bytes,
            )
            defer = self._put_off_on_the_way_down(best, budget_bytes)
            if not self._is_near_bound(defer, budget_bytes, _CLOSE):
                best = self._improved_starts(
                    best, self._of_several_levels(budget_bytes), budget_bytes
                )
            self._known_first[budget_bytes] = best, defer
        return self._known_first[budget_bytes]

    def frontier(self) -> list[tuple[int, Candidate]]:
        """Budgets and the best within them: growing budgets, falling times."""
        return nondominated(
            linspace_int(self.minimum().peak_bytes, self._baseline.peak_bytes, FRONTIER_POINTS),
            self.best_within,
        )

    def minimum(self) -> Candidate:
        """The schedule of the smallest peak."""
        return min(self._smallest, key=by_peak)

    @cached_property
    def _smallest(self) -> list[Candidate]:
        """Nothing recomputed, what is proposed for the smallest peak, and what these become as values are evicted from them.

        The smallest always, of long schedules few others.
        """
        found = [self._baseline, *self._proposed_smallest]
        starts = sorted(
            found, key=lambda candidate: (candidate.peak_bytes, len(candidate.schedule.steps))
        )
        num_runs = accumulate(len(start.schedule.steps) for start in starts)
        shrunk = [
            start
            for start, number in zip(starts, num_runs, strict=True)
            if start is starts[0] or number <= _MOST_RUNS_SHRUNK
        ]
        return [*found, *(smaller for start in shrunk for smaller in self._shrunk(start))]

    @cached_property
    def _proposed_smallest(self) -> list[Candidate]:
        return [self._improver.evaluated(maker()) for maker in self._proposals.smallest()]

    @cached_property
    def _counted(self) -> Costs:
        return unit_times(self._costs)

    def _shrunk(self, candidate: Candidate) -> list[Candidate]:
        """What the schedule becomes for as long as evictions lower its peak; those, too, count ops instead of timing them."""
        found, share = list[Candidate](), _LARGEST_SHRINKAGE
        while share >= _SMALLEST_SHRINKAGE:
            smaller = self._improver.repair(
                candidate, int(candidate.peak_bytes * (1 - share)), self._counted
            )
            if smaller is None:
                share /= 2
            else:
                found.append(candidate := smaller)
        return found

    @cached_property
    def _several_levels(self) -> Family:
        return Family(self._proposals.several_levels(), self._improver.evaluated)

    @cached_property
    def _ladder_put_off(self) -> TighteningPath:
        return TighteningPath(self._baseline, _STEP_DOWN, self._improved_put_off)

    @cached_property
    def _ladders(self) -> list[TighteningPath]:
        steps = _STEPS_DOWN_OF_LONG if self._improver.is_long else _STEPS_DOWN
        return [TighteningPath(self._baseline, step, self._improver.improved) for step in steps]

    # --- many budgets together -----------------------------------------------------------------------------------------------

    def best_within_each(
        self, budgets: Iterable[int], *, progress: bool = False
    ) -> dict[int, Candidate]:
        """Schedules for many budgets, in much less time than one by one takes, since each begins with those of its neighbours.

        A larger budget never takes longer. Near the bound they are as fast as those of `best_within`; where that is far, near the
        minimum, some percent of a step slower now and then, or faster. Budgets that `best_within` does not meet are left out.
        """
        asked = sorted(set(budgets), reverse=True)
        in_order = [budget for budget in asked if budget >= self.minimum().peak_bytes]
        below = {
            budget: best
            for budget in asked[len(in_order) :]
            if (best := self.best_within(budget)) is not None
        }
        found: list[Candidate] = []
        attempts = TriedStarts(self._improver)
        for budget_bytes in tqdm(
            in_order, desc="planning", unit="budget", disable=not (progress and in_order)
        ):
            found.append(self._below_larger(found, budget_bytes, attempts))
        if found:
            found[-1] = min(
                (*below.values(), self._smallest_raised(found[-1], in_order[-1])), key=by_time
            )
        self._improve_from_smaller(found, in_order, attempts)
        self._improve_from_larger(found, in_order, attempts)
        self._improve_from_smaller(found, in_order, attempts)
        return dict(zip(in_order, found, strict=True)) | below

    def _smallest_raised(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """What comes of the schedule for the smallest budget when it is given more room and less again, where it is far from the bound."""
        if self._is_near_bound(candidate, budget_bytes, _FAR):
            return candidate
        return self._once_up_and_down(
            self._improver.defer_weight_gradients(candidate, budget_bytes), budget_bytes
        )

    def _below_larger(
        self, larger: Sequence[Candidate], budget_bytes: int, attempts: TriedStarts
    ) -> Candidate:
        """The fastest of what comes of the bound's own solution, of the schedule for the next larger budget and, far off, of others."""
        best = feasible(self._smallest, budget_bytes)[0]
        if self._is_near_bound(best, budget_bytes, _RATHER_NEAR):
            return best
        schedule = self._proposals.from_relaxation(budget_bytes)
        starts = [] if schedule is None else [self._improver.evaluated(schedule)]
        for start in (*starts, *larger[-1:]):
            if not self._is_near_bound(best, budget_bytes, _RATHER_NEAR):
                best = fastest(best, attempts.improved(start, budget_bytes, best.time_ms))
        if not self._is_near_bound(best, budget_bytes, _SOMEWHAT_NEAR):
            best = self._improver.defer_weight_gradients(best, budget_bytes)
        far_above = [self._baseline] if len(larger) < _BACK else [self._baseline, larger[-_BACK]]
        for start in far_above if not self._is_near_bound(best, budget_bytes, _FAR) else ():
            lowered = attempts.improved(start, budget_bytes, best.time_ms)
            if (
                lowered is not None
                and lowered.time_ms < best.time_ms + _NOT_FAR * self._baseline.time_ms
            ):
                best = fastest(best, self._improver.defer_weight_gradients(lowered, budget_bytes))
        return best

    def _improve_from_smaller(
        self, found: list[Candidate], budgets: Sequence[int], attempts: TriedStarts
    ) -> None:
        """From the smallest budget up, has each schedule be no slower than the one before, and tries that with the room there is."""
        for place in range(len(found) - 2, -1, -1):
            smaller = found[place + 1]
            if smaller.time_ms < found[place].time_ms or not self._is_near_bound(
                found[place], budgets[place], _RATHER_NEAR
            ):
                found[place] = fastest(
                    found[place], attempts.improved(smaller, budgets[place], found[place].time_ms)
                )

    def _improve_from_larger(
        self, found: list[Candidate], budgets: Sequence[int], attempts: TriedStarts
    ) -> None:
        """From the largest budget down, tries what came of the one before where that may be faster."""
        for place in range(1, len(found)):
            if not self._is_near_bound(found[place], budgets[place], _RATHER_NEAR):
                found[place] = fastest(
                    found[place],
                    attempts.improved(found[place - 1], budgets[place], found[place].time_ms),
                )

    # --- starts --------------------------------------------------------------------------------------------------------------

    def _improved_starts(
        self, best: Candidate, starts: Iterable[tuple[float, list[Candidate]]], budget_bytes: int
    ) -> Candidate:
        """The fastest of `best` and what comes of groups of schedules, each with how near to the bound makes it not worth it.

        Of a group, the first that can be made to fit counts.
        """
        for near, group in starts:
            if self._is_near_bound(best, budget_bytes, near):
                return best
            best = fastest(best, self._first_improved(group, budget_bytes, best.time_ms))
        return best

    def _of_one_level(self, budget_bytes: int) -> Iterator[tuple[float, list[Candidate]]]:
        """What the bound is the time of; and the fastest of one level that fits, as a few limits tell, with the next that does not."""
        schedule = self._proposals.from_relaxation(budget_bytes)
        if schedule is None:
            return
        found = self._improver.evaluated(schedule)
        yield _NEAR, [found]
        limit_bytes, low, high = (
            found.simulation.saved_bytes,
            0,
            self._baseline.simulation.saved_bytes,
        )
        tried: list[Candidate] = []
        while len(tried) < _LIMITS and high - low > _CLOSELY * budget_bytes:
            limit_bytes -= (
                found.peak_bytes - budget_bytes
            )  # a byte more or less that is saved is one of the peak, as a rule
            if not low < limit_bytes < high:
                limit_bytes = (low + high) // 2
            schedule = self._proposals.saving(limit_bytes)
            if schedule is None:
                break
            found = self._improver.evaluated(schedule)
            tried.append(found)
            low, high = (
                (limit_bytes, high) if found.peak_bytes <= budget_bytes else (low, limit_bytes)
            )
        yield _NEAR, feasible(tried, budget_bytes)[:1]
        yield _NEAR, infeasible(tried, budget_bytes)[:1]

    def _of_several_levels(self, budget_bytes: int) -> Iterator[tuple[float, list[Candidate]]]:
        """Schedules near the budget, those of the grid first: making others takes as long as improving these, and seldom gains as much."""
        grid = self._several_levels.grid()
        yield _NEAR, infeasible(grid, budget_bytes)[:1]
        yield _NEAR, feasible([*self._smallest, *grid], budget_bytes)[:1]
        yield _RATHER_NEAR, []
        near_budget = self._several_levels.near_budget(budget_bytes)
        yield _RATHER_NEAR, feasible(near_budget, budget_bytes)[:1]
        exceeding = infeasible([*grid, *near_budget], budget_bytes)
        yield _RATHER_NEAR, exceeding[:_MAX_STARTS]
        if budget_bytes < _TIGHT * self.minimum().peak_bytes:
            yield from (
                (_RATHER_NEAR, [exceeding[index]])
                for index in subsample(len(exceeding), _TIGHT_STARTS)[1:]
            )
        yield from (
            (_FAR, [smallest])
            for smallest in self._proposed_smallest
            if smallest.time_ms > self._baseline.time_ms
        )

    def _brought_down(self, best: Candidate, budget_bytes: int) -> list[Candidate]:
        """What schedules far above the budget become as values are evicted by and by: of branches side by side, proposals know little."""
        starts = [ladder.smallest_above(budget_bytes) for ladder in self._ladders]
        if not (self._improver.is_long or self._is_near_bound(best, budget_bytes, _FAR)):
            starts += [
                candidate
                for candidate in self._several_levels.grid()
                if candidate.peak_bytes > MAX_EXCESS * budget_bytes
            ]
        found = (
            self._improver.improved(start, budget_bytes) for start in starts if start is not None
        )
        return [candidate for candidate in found if candidate is not None]

    def _put_off_on_the_way_down(self, best: Candidate, budget_bytes: int) -> Candidate:
        """The fastest of `best` and what comes of the rungs around the budget of the ladder with runs put off; of long steps `best`."""
        if self._improver.is_long:
            return best
        for rung_beside in (
            self._ladder_put_off.smallest_above,
            self._ladder_put_off.largest_below,
        ):
            if self._is_near_bound(best, budget_bytes, _CLOSE):
                return best
            rung = rung_beside(budget_bytes)
            best = (
                best if rung is None else fastest(best, self._improved_put_off(rung, budget_bytes))
            )
        return best

    # --- improvement ---------------------------------------------------------------------------------------------------------

    def _thoroughly_improved(self, best: Candidate, budget_bytes: int) -> Candidate:
        """The fastest of what `best` and what is brought down become with runs put off, given more room and less again.

        Far from the bound that is tried with both, nearer and of a long step with the faster of the two.
        """
        if self._is_near_bound(best, budget_bytes, _RATHER_NEAR):
            return best
        found = self._improver.defer_weight_gradients(best, budget_bytes)
        if self._is_near_bound(found, budget_bytes, _NOT_FAR):
            return found
        brought_down = min(self._brought_down(best, budget_bytes), key=by_time, default=best)
        faster, slower = sorted([best, brought_down], key=by_time)
        found = fastest(found, self._up_and_down(faster, budget_bytes))
        if (
            self._improver.is_long
            or self._is_near_bound(found, budget_bytes, _FAR)
            or slower.schedule == faster.schedule
        ):
            return found
        return fastest(found, self._up_and_down(slower, budget_bytes))

    def _up_and_down(self, best: Candidate, budget_bytes: int) -> Candidate:
        """What comes of `best` when it is given more room and then less again, by and by, until that gains nothing; of a long step once."""
        best = self._improver.defer_weight_gradients(best, budget_bytes)
        while not self._is_near_bound(best, budget_bytes, _NOT_FAR):
            found = self._once_up_and_down(best, budget_bytes)
            if found is best or self._improver.is_long:
                return found
            best = found
        return best

    def _once_up_and_down(self, best: Candidate, budget_bytes: int) -> Candidate:
        return fastest(best, min(self._from_tops(best, budget_bytes), key=by_time, default=None))

    def _from_tops(self, best: Candidate, budget_bytes: int) -> Iterator[Candidate]:
        """What comes of `best` when it is raised to each of the tops and lowered again."""
        tops, budgets = _TOPS_OF_LONG if self._improver.is_long else _TOPS, [budget_bytes]
        for num_steps in range(1, tops[-1] + 1):
            budgets.append(int(budgets[-1] * _STEP_UP))
            best = self._improver.refine(best, budgets[-1])
            for top in self._tops(best, budgets[-1]) if num_steps in tops else ():
                lowered = self._lowered(top, budgets[-2::-1])
                if lowered is not None:
                    yield self._improver.defer_weight_gradients(lowered, budget_bytes)

    def _tops(self, candidate: Candidate, budget_bytes: int) -> list[Candidate]:
        """The schedule as it is and, where that is faster, with runs put off."""
        found = self._improver.defer_weight_gradients(candidate, budget_bytes)
        return [candidate] if found is candidate else [candidate, found]

    def _lowered(self, candidate: Candidate, budgets: Sequence[int]) -> Candidate | None:
        """What comes of a schedule when it is improved for one budget after the other."""
        found: Candidate | None = candidate
        for budget_bytes in budgets:
            found = None if found is None else self._improver.improved(found, budget_bytes)
        return found

    def _first_improved(
        self, starts: Sequence[Candidate], budget_bytes: int, known_ms: float
    ) -> Candidate | None:
        """What comes of the first of `starts` that can be made to fit, None if none can.

        Making room takes time, so a start that does not fit and takes no less than `known_ms` is left out.
        """
        for start in starts:
            if is_worth_refining(start, budget_bytes, known_ms):
                improved = self._improver.improved(start, budget_bytes)
                if improved is not None:
                    return improved
        return None

    def _improved_put_off(self, candidate: Candidate, budget_bytes: int) -> Candidate | None:
        """As `ScheduleRefiner.improved`, with runs put off where that leaves it far from the bound."""
        found = self._improver.improved(candidate, budget_bytes)
        if found is None or self._is_near_bound(found, budget_bytes, _RATHER_NEAR):
            return found
        return self._improver.defer_weight_gradients(found, budget_bytes)

    def _is_near_bound(self, candidate: Candidate, budget_bytes: int, near: float) -> bool:
        least_ms = self._baseline.time_ms
        return candidate.time_ms <= max(
            self._proposals.bound_ms(budget_bytes) + near * least_ms, least_ms
        )
