"""Strategic oscillation: relaxes a schedule to larger budgets and tightens it again.

A local search across the boundary of feasibility (Glover 1977). The schedule is refined for budgets
that grow by a ratio. From several of them it is repaired and refined for each smaller budget in
turn, down to the one asked for. Greedy moves then take another path than they took before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rockmate.planning.candidate import Candidate, by_time, fastest
from rockmate.planning.search_problem import SKIP_OSCILLATION_BELOW_GAP, SearchProblem

# Ratio between neighbouring budgets of an oscillation.
_BUDGET_RATIO_RELAX = 1.15
# Numbers of steps up after which the schedule is tightened again.
_RELAX_DEPTHS = (1, 3, 6)
# The same for a long step, where all depths together would take too long.
_RELAX_DEPTHS_LONG = (3,)


class StrategicOscillation:
    """Relaxes schedules of one graph and tightens them again.

    Args:
        problem: the graph, its refiner and its lower bound.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._refiner = problem.refiner

    def is_skipped(self, candidate: Candidate, budget_bytes: int) -> bool:
        """Whether a candidate is too near the lower bound for an oscillation to pay."""
        return self._problem.is_within_gap(candidate, budget_bytes, SKIP_OSCILLATION_BELOW_GAP)

    def run(self, best: Candidate, budget_bytes: int) -> Candidate:
        """Oscillates until that gains nothing; once for a long step."""
        best = self._refiner.defer_weight_gradients(best, budget_bytes)
        while not self.is_skipped(best, budget_bytes):
            found = self.run_once(best, budget_bytes)
            if found is best or self._problem.is_long:
                return found
            best = found
        return best

    def run_once(self, best: Candidate, budget_bytes: int) -> Candidate:
        """The fastest of a feasible schedule and of the results of one oscillation."""
        tightened = self._relax_and_tighten(best, budget_bytes)
        return fastest(best, min(tightened, key=by_time, default=None))

    def _relax_and_tighten(self, best: Candidate, budget_bytes: int) -> Iterator[Candidate]:
        """The feasible schedules that result from each depth of relaxation."""
        depths = _RELAX_DEPTHS_LONG if self._problem.is_long else _RELAX_DEPTHS
        budgets = [budget_bytes]
        for depth in range(1, depths[-1] + 1):
            if self._problem.rule.is_late:
                return
            budgets.append(int(budgets[-1] * _BUDGET_RATIO_RELAX))
            best = self._refiner.refine(best, budgets[-1])
            for top in self._tops(best, budgets[-1]) if depth in depths else ():
                tightened = self._tighten(top, budgets[-2::-1])
                if tightened is not None:
                    yield self._refiner.defer_weight_gradients(tightened, budget_bytes)

    def _tops(self, candidate: Candidate, budget_bytes: int) -> list[Candidate]:
        """The schedules to tighten: the relaxed one and, if faster, the same with deferral."""
        deferred = self._refiner.defer_weight_gradients(candidate, budget_bytes)
        return [candidate] if deferred is candidate else [candidate, deferred]

    def _tighten(self, candidate: Candidate, budgets: Sequence[int]) -> Candidate | None:
        """Repairs and refines a schedule for one budget after the other; None if a repair fails."""
        found: Candidate | None = candidate
        for budget_bytes in budgets:
            found = None if found is None else self._refiner.repair_and_refine(found, budget_bytes)
        return found
