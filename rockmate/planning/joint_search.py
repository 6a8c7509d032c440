"""The local search for many budgets together: each starts from the schedules of its neighbours.

This takes much less time than one search for each budget, and a larger budget never takes longer.
Passes: from the largest budget down, from the smallest up, down and up again. Near the lower bound,
the schedules are as fast as those of `LocalSearch.best_within`. Far from it, near the minimum, some
are a few percent of a step slower or faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tqdm import tqdm

from rockmate.planning.candidate import Candidate, by_time, fastest, is_worth_refining
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.refine import ScheduleRefiner
from rockmate.planning.search_problem import (
    SKIP_DEFERRAL_BELOW_GAP,
    SKIP_DISTANT_STARTS_BELOW_GAP,
    SKIP_REFINEMENT_BELOW_GAP,
)
from rockmate.schedule.schedule import Schedule

# Far from the bound, also start from the schedule this many budgets above.
_NEIGHBOUR_DISTANCE = 9
# Defer gradients of a tightened schedule that is slower than the incumbent by less than this share
# of the baseline time.
_DEFERRAL_SLACK = 1e-2


class TriedStarts:
    """Refines each pair of start and budget once; a repetition would give the same outcome.

    Args:
        refiner: repairs and refines the starts.
    """

    def __init__(self, refiner: ScheduleRefiner) -> None:
        self._refiner = refiner
        self._tried: set[tuple[Schedule, int]] = set()

    def refine(self, start: Candidate, budget_bytes: int, incumbent_ms: float) -> Candidate | None:
        """The start made feasible and refined.

        None if it was tried before, if it cannot be made feasible, or if it exceeds the budget and
        is no faster than the incumbent.
        """
        key = (start.schedule, budget_bytes)
        if not is_worth_refining(start, budget_bytes, incumbent_ms) or key in self._tried:
            return None
        self._tried.add(key)
        return self._refiner.repair_and_refine(start, budget_bytes)


class JointSearch:
    """The search for many budgets together.

    Args:
        search: the search for one budget of the same graph.
    """

    def __init__(self, search: LocalSearch) -> None:
        self._search = search
        self._problem = search.problem
        self._refiner = search.problem.refiner
        self._tried = TriedStarts(self._refiner)

    def best_within_each(
        self, budgets: Iterable[int], *, progress: bool = False
    ) -> dict[int, Candidate]:
        """Schedules by budget; a larger budget never takes longer.

        Args:
            budgets: in bytes. Those without a schedule in `LocalSearch.best_within` are left out.
            progress: shows a progress bar.
        """
        falling = sorted(set(budgets), reverse=True)
        in_order = [budget for budget in falling if budget >= self._search.minimum().peak_bytes]
        below_minimum = {
            budget: best
            for budget in falling[len(in_order) :]
            if (best := self._search.best_within(budget)) is not None
        }
        found: list[Candidate] = []
        for budget_bytes in tqdm(
            in_order, desc="planning", unit="budget", disable=not (progress and in_order)
        ):
            found.append(self._from_larger_budgets(found, budget_bytes))
        if found:
            smallest = self._oscillate(found[-1], in_order[-1])
            found[-1] = min((*below_minimum.values(), smallest), key=by_time)
        self._improve_upwards(found, in_order)
        self._improve_downwards(found, in_order)
        self._improve_upwards(found, in_order)
        return dict(zip(in_order, found, strict=True)) | below_minimum

    def _is_within(self, candidate: Candidate, budget_bytes: int, gap: float) -> bool:
        return self._problem.is_within_gap(candidate, budget_bytes, gap)

    def _oscillate(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """One oscillation of the schedule for the smallest budget, if it is far from the bound."""
        if self._is_within(candidate, budget_bytes, SKIP_DISTANT_STARTS_BELOW_GAP):
            return candidate
        deferred = self._refiner.defer_weight_gradients(candidate, budget_bytes)
        return self._search.oscillation.run_once(deferred, budget_bytes)

    def _from_larger_budgets(self, larger: Sequence[Candidate], budget_bytes: int) -> Candidate:
        """The fastest result of the relaxation's start and of the schedules of larger budgets.

        Args:
            larger: schedules of the larger budgets, the largest first.
            budget_bytes: the budget to search.
        """
        best = self._search.min_peak.fastest_within(budget_bytes)
        if self._is_within(best, budget_bytes, SKIP_REFINEMENT_BELOW_GAP):
            return best
        schedule = self._problem.starts.from_relaxation(budget_bytes)
        starts = [] if schedule is None else [self._refiner.evaluate(schedule)]
        for start in (*starts, *larger[-1:]):
            if not self._is_within(best, budget_bytes, SKIP_REFINEMENT_BELOW_GAP):
                best = fastest(best, self._tried.refine(start, budget_bytes, best.time_ms))
        if not self._is_within(best, budget_bytes, SKIP_DEFERRAL_BELOW_GAP):
            best = self._refiner.defer_weight_gradients(best, budget_bytes)
        if self._is_within(best, budget_bytes, SKIP_DISTANT_STARTS_BELOW_GAP):
            return best
        distant = [self._problem.baseline]
        if len(larger) >= _NEIGHBOUR_DISTANCE:
            distant.append(larger[-_NEIGHBOUR_DISTANCE])
        slack_ms = _DEFERRAL_SLACK * self._problem.baseline.time_ms
        for start in distant:
            tightened = self._tried.refine(start, budget_bytes, best.time_ms)
            if tightened is not None and tightened.time_ms < best.time_ms + slack_ms:
                deferred = self._refiner.defer_weight_gradients(tightened, budget_bytes)
                best = fastest(best, deferred)
        return best

    def _improve_upwards(self, found: list[Candidate], budgets: Sequence[int]) -> None:
        """From the smallest budget up: no schedule stays slower than the next smaller one's."""
        for place in range(len(found) - 2, -1, -1):
            smaller, best, budget_bytes = found[place + 1], found[place], budgets[place]
            if smaller.time_ms < best.time_ms or not self._is_within(
                best, budget_bytes, SKIP_REFINEMENT_BELOW_GAP
            ):
                refined = self._tried.refine(smaller, budget_bytes, best.time_ms)
                found[place] = fastest(best, refined)

    def _improve_downwards(self, found: list[Candidate], budgets: Sequence[int]) -> None:
        """From the largest budget down: starts from the next larger one, if far from the bound."""
        for place in range(1, len(found)):
            larger, best, budget_bytes = found[place - 1], found[place], budgets[place]
            if not self._is_within(best, budget_bytes, SKIP_REFINEMENT_BELOW_GAP):
                refined = self._tried.refine(larger, budget_bytes, best.time_ms)
                found[place] = fastest(best, refined)
