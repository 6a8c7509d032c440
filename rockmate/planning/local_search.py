"""Iterated local search: the fastest schedule within one budget, or within each of many.

1. **Starts.** The relaxation of the lower bound and the knapsack propose schedules. Each is
   repaired and refined (`refine`).
2. **Rounds.** The incumbent is perturbed, repaired and refined again (`perturbation`); the result
   is the incumbent if it is faster.

Both end where the incumbent is within the gap tolerance of the lower bound, and when time is over
(`StoppingRule`). Rounds end as well where the search has stalled. The simulator judges every
schedule. The search is a heuristic: it proves nothing, and the gap to the lower bound tells how
good a result is.

Of many budgets the largest comes first, and each has the schedule of the one before as a further
start. Then each schedule is refined for the next larger budget, so that more memory never takes
longer.

The answer for one budget depends on it alone, unless the clock ends the search: earlier questions
only save time. `search_trace` logs each step: the incumbent's time and gap.

References: iterated local search (Lourenco, Martin and Stützle 2003).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from itertools import accumulate

from rockmate._util import progress_bar
from rockmate.costs.cost import unit_times
from rockmate.planning.candidate import Candidate, by_peak, fastest, feasible
from rockmate.planning.perturbation import Perturbation
from rockmate.planning.search_problem import SearchProblem
from rockmate.planning.search_trace import SearchTrace

# The fastest schedule at the minimum budget sometimes fits in less, in practice never below this
# fraction of it.
_MIN_BUDGET_FRACTION = 0.9
# The search has stalled after so many rounds without gain, and after rounds of so many ops
# together. Within `_FULL_EFFORT` times the gap tolerance it is less, in proportion to the gap.
_STALL_ROUNDS = 160
_STALL_OPS = 30_000
_FULL_EFFORT = 10.0
# Of many budgets each has a share of these rounds, but no less than this one: neighbours' schedules
# stand in for the rest.
_LEAST_SHARE = 1 / 8
# A round gains something if it takes more than this fraction off the baseline's time.
_MIN_GAIN = 1e-5
# Limit on the runs, in all starts together, that are shrunk by eviction. The smallest always is.
_MAX_SHRUNK_RUNS = 10_000
# Share of its peak by which a schedule is first shrunk in one step.
_MAX_SHRINK_STEP = 0.06
# Smallest such share: the step is halved after each failure, down to this.
_MIN_SHRINK_STEP = 0.01


class LocalSearch:
    """The search of the default strategy. Nothing is solved before it is asked for.

    Attributes:
        problem: the graph with its baseline, starts and refiner.
        relaxed: gives the relaxation's schedule within a budget, which may need more; None if there
            is none.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._trace = cache(self._new_trace)
        self._solved = cache(self._solve)
        self._initial = cache(self._find_initial)
        self.relaxed = cache(self._relaxation)

    def minimum(self) -> Candidate:
        """The schedule with the smallest peak."""
        return min(self._small, key=by_peak)

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """The fastest schedule found with a simulated peak of at most `budget_bytes`.

        None if the budget is below the minimum. A smaller budget has an answer where the fastest
        schedule at the minimum happens to need no more.
        """
        minimum_bytes = self.minimum().peak_bytes
        if budget_bytes < minimum_bytes:
            if budget_bytes < _MIN_BUDGET_FRACTION * minimum_bytes:
                return None
            best = self.best_within(minimum_bytes)
            return best if best and best.peak_bytes <= budget_bytes else None
        return self._solved(budget_bytes)

    def _relaxation(self, budget_bytes: int) -> Candidate | None:
        schedule = self.problem.starts.from_relaxation(budget_bytes)
        return schedule and self.problem.refiner.evaluate(schedule)

    def initial_within(self, budget_bytes: int) -> Candidate | None:
        """The incumbent after the starts that take milliseconds; None as for `best_within`."""
        if budget_bytes < self.minimum().peak_bytes:
            return self.best_within(budget_bytes)
        return self._initial(budget_bytes)

    def _find_initial(self, budget_bytes: int) -> Candidate:
        best = feasible(self._small, budget_bytes)[0]
        self._trace(budget_bytes).note("smallest peaks", best)
        return self._from_starts(best, self._quick_starts(budget_bytes), budget_bytes)

    def best_within_each(
        self, budgets: Iterable[int], *, progress: bool = False
    ) -> dict[int, Candidate]:
        """Schedules by budget, planned together; a larger budget never takes longer.

        Args:
            budgets: in bytes. Those without a schedule in `best_within` are left out.
            progress: shows a progress bar.
        """
        found: dict[int, Candidate] = {}
        larger: Candidate | None = None
        falling = sorted(set(budgets), reverse=True)
        feasible_budgets = [each for each in falling if each >= self.minimum().peak_bytes]
        share = max(_LEAST_SHARE, 1 / max(1, len(feasible_budgets)))
        for budget_bytes in progress_bar(
            feasible_budgets, desc="planning", unit="budget", disable=not (progress and falling)
        ):
            # All budgets above profit from the schedule for the smallest.
            is_smallest = budget_bytes == feasible_budgets[-1]
            larger = found[budget_bytes] = self._solve(
                budget_bytes, larger, share=1.0 if is_smallest else share
            )
        for budget_bytes in falling[len(feasible_budgets) :]:
            if (best := self.best_within(budget_bytes)) is not None:
                found[budget_bytes] = best
        return self._refined_upwards(found)

    def _refined_upwards(self, found: dict[int, Candidate]) -> dict[int, Candidate]:
        """From the smallest budget up: each schedule is a start for the next larger budget."""
        smaller: Candidate | None = None
        for budget_bytes in sorted(found):
            best = found[budget_bytes]
            if smaller is not None and not self.problem.is_solved(best, budget_bytes):
                best = fastest(best, self.problem.refiner.repair_and_refine(smaller, budget_bytes))
            smaller = found[budget_bytes] = fastest(best, smaller)
        return found

    def _solve(
        self, budget_bytes: int, neighbour: Candidate | None = None, *, share: float = 1.0
    ) -> Candidate:
        """The search for one budget of at least the minimum.

        Args:
            budget_bytes: the budget.
            neighbour: the schedule of another budget, as a further start.
            share: of the rounds without gain after which the search has stalled.
        """
        best = self.initial_within(budget_bytes)
        assert best is not None
        if neighbour is not None:
            best = self._from_starts(best, [("neighbour", neighbour)], budget_bytes)
        return self._from_rounds(best, budget_bytes, share)

    def _new_trace(self, budget_bytes: int) -> SearchTrace:
        return SearchTrace(
            budget_bytes=budget_bytes,
            baseline_ms=self.problem.baseline.time_ms,
            bound_ms=self.problem.starts.bound_ms(budget_bytes),
        )

    # --- starts ---

    def _from_starts(
        self, best: Candidate, starts: Iterable[tuple[str, Candidate]], budget_bytes: int
    ) -> Candidate:
        """The fastest of an incumbent and of the starts, each made to fit and refined."""
        for source, start in starts:
            if self.problem.is_solved(best, budget_bytes):
                break
            # Repair takes time, and adds time to a schedule.
            if start.peak_bytes <= budget_bytes or start.time_ms < best.time_ms:
                refined = self.problem.refiner.repair_and_refine(start, budget_bytes)
                best = fastest(best, refined)
            self._trace(budget_bytes).note(source, best)
        return best

    def _quick_starts(self, budget_bytes: int) -> Iterator[tuple[str, Candidate]]:
        """The relaxation's schedule, and the knapsack's for a limit corrected by its excess."""
        starts, refiner = self.problem.starts, self.problem.refiner
        relaxed = self.relaxed(budget_bytes)
        if relaxed is None:
            return
        yield "relaxation", relaxed
        # As a rule, the peak falls by a byte with each byte that is not saved, for each forward in
        # flight.
        excess_bytes = relaxed.peak_bytes - budget_bytes
        spared_bytes = excess_bytes // self.problem.graph.num_in_flight
        limit_bytes = relaxed.simulation.saved_bytes - spared_bytes
        if limit_bytes > 0 and (schedule := starts.from_knapsack(limit_bytes)) is not None:
            yield "knapsack", refiner.evaluate(schedule)

    # --- rounds ---

    def _from_rounds(self, best: Candidate, budget_bytes: int, share: float) -> Candidate:
        """The fastest of an incumbent and of rounds, until they gain nothing."""
        problem = self.problem
        if problem.is_solved(best, budget_bytes):
            return best
        perturbation = Perturbation(problem, budget_bytes)
        max_idle = share * min(_STALL_ROUNDS, _STALL_OPS // len(problem.graph.ops))
        least_gain_ms = _MIN_GAIN * problem.baseline.time_ms
        num_idle = 0
        while not problem.is_solved(best, budget_bytes):
            effort = problem.gap(best, budget_bytes) / (_FULL_EFFORT * problem.rule.gap_tolerance)
            if num_idle + 1 > min(1.0, effort) * max_idle:
                break
            source, found = perturbation.round(best)
            is_gain = found is not None and found.time_ms < best.time_ms - least_gain_ms
            best = fastest(best, found)
            self._trace(budget_bytes).note(source, best)
            num_idle = 0 if is_gain else num_idle + 1
        return best

    # --- smallest peaks ---

    @cached_property
    def _small(self) -> list[Candidate]:
        """Schedules of small peaks: baseline and warm starts, and what evictions shrink them to.

        Op times are measured and differ a little from planner to planner. The set of feasible
        budgets must not: a minimum that one planner names has to work in the next. So all of this
        counts ops instead of timing them, and gives equal schedules for equal graphs.
        """
        problem = self.problem
        found = [problem.baseline, *map(problem.refiner.evaluate, problem.starts.small())]
        in_order = sorted(
            found, key=lambda candidate: (candidate.peak_bytes, len(candidate.schedule.steps))
        )
        num_runs = accumulate(len(start.schedule.steps) for start in in_order)
        chosen = [
            start
            for start, number in zip(in_order, num_runs, strict=True)
            if start is in_order[0] or number <= _MAX_SHRUNK_RUNS
        ]
        return [*found, *(smaller for start in chosen for smaller in self._shrink(start))]

    def _shrink(self, candidate: Candidate) -> list[Candidate]:
        """The schedules of falling peaks that evictions make of a candidate."""
        found, share = list[Candidate](), _MAX_SHRINK_STEP
        costs = unit_times(self.problem.costs)
        while share >= _MIN_SHRINK_STEP:
            budget_bytes = int(candidate.peak_bytes * (1 - share))
            smaller = self.problem.refiner.repair(candidate, budget_bytes, costs)
            if smaller is None:
                share /= 2
            else:
                found.append(candidate := smaller)
        return found
