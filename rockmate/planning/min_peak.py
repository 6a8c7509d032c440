"""The search for the smallest peak: warm starts, with values evicted until no eviction helps.

Op times are measured and differ a little from planner to planner. The set of feasible budgets must
not: a minimum that one planner names has to work in the next. So all of this search counts ops
instead of timing them, and gives equal schedules for equal graphs.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

from rockmate.costs.cost import unit_times
from rockmate.planning.candidate import Candidate, by_peak, feasible
from rockmate.planning.search_problem import SearchProblem

# Limit on the runs, in all starts together, that are shrunk by eviction. The smallest start always
# is.
_MAX_SHRUNK_RUNS = 10_000
# Share of its peak by which a schedule is first shrunk in one step.
_MAX_SHRINK_STEP = 0.06
# Smallest such share: the step is halved after each failure, down to this.
_MIN_SHRINK_STEP = 0.01


class MinPeakPool:
    """Schedules of small peaks, each computed on demand.

    Args:
        problem: the graph, its baseline and its warm starts.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem

    def minimum(self) -> Candidate:
        """The schedule with the smallest peak."""
        return min(self.candidates, key=by_peak)

    def fastest_within(self, budget_bytes: int) -> Candidate:
        """The fastest schedule of the pool within a budget, which is at least the minimum."""
        return feasible(self.candidates, budget_bytes)[0]

    @cached_property
    def starts(self) -> list[Candidate]:
        """The warm starts of small peaks."""
        problem = self._problem
        return [problem.refiner.evaluate(maker()) for maker in problem.starts.min_peak()]

    @cached_property
    def candidates(self) -> list[Candidate]:
        """The baseline, the starts, and the schedules that they shrink to."""
        found = [self._problem.baseline, *self.starts]
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
        costs = unit_times(self._problem.costs)
        while share >= _MIN_SHRINK_STEP:
            budget_bytes = int(candidate.peak_bytes * (1 - share))
            smaller = self._problem.refiner.repair(candidate, budget_bytes, costs)
            if smaller is None:
                share /= 2
            else:
                found.append(candidate := smaller)
        return found
