"""Plans with moves: schedules for larger budgets, brought within a budget by moves.

Recomputation and moves are chosen together in this way: a schedule for a budget B' >= B recomputes
what does not fit B', and what exceeds B of it moves. Of a grid of B' the fastest is taken, by the
replay in lanes. The schedule without moves for B itself is one of them, so a plan with moves never
takes longer than that without.
"""

from __future__ import annotations

from rockmate.planning.candidate import Candidate, by_peak, by_time
from rockmate.planning.chunk_variants import Variant
from rockmate.planning.moving import MoveFinder
from rockmate.planning.step_forms import StepForms

# Budgets whose schedules moves begin with, as shares of the baseline's peak.
_SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.22, 0.16, 0.12, 0.09)

Found = tuple[Variant, Candidate]


class MovePlanner:
    """Finds plans with moves for the forms of one step.

    Args:
        forms: of the step; their costs have the rates of the link.
        baseline_peak_bytes: the peak without recomputation.
        host_bytes: most bytes in the other tier; None for no limit.
    """

    def __init__(
        self, forms: StepForms, baseline_peak_bytes: int, host_bytes: int | None = None
    ) -> None:
        self._forms = forms
        self._baseline_peak_bytes = baseline_peak_bytes
        self._host_bytes = host_bytes
        self._starts: dict[int, Found | None] = {}
        self._finders: dict[Variant, MoveFinder] = {}

    def best_within(self, budget_bytes: int, unmoved: Found | None) -> Found | None:
        """The fastest schedule found within a budget; None if moves do not bring any there.

        Args:
            budget_bytes: the budget.
            unmoved: the fastest without moves; None if none fits.
        """
        found = [] if unmoved is None else [unmoved]
        for variant, candidate in self._starts_above(budget_bytes):
            if candidate.time_ms >= min((each.time_ms for _, each in found), default=float("inf")):
                continue
            moved = self._moved(variant, candidate, budget_bytes)
            if moved is not None:
                found.append((variant, moved))
        return min(found, key=lambda each: by_time(each[1]), default=None)

    def min_peak(self, unmoved: Found) -> Found:
        """The schedule of the smallest peak found.

        Args:
            unmoved: that without moves.
        """
        found = [unmoved]
        for variant, candidate in (unmoved, *self._starts_above(0)):
            finder = self._finder(variant)
            least = finder.least_peak(candidate.schedule, candidate.simulation)
            if least < min(each.peak_bytes for _, each in found):
                moved = self._moved(variant, candidate, least)
                if moved is not None:
                    found.append((variant, moved))
        return min(found, key=lambda each: by_peak(each[1]))

    def _starts_above(self, budget_bytes: int) -> list[Found]:
        """Schedules without moves for larger budgets, those of the largest first."""
        smallest = self._forms.unchunked, self._forms.minimum("rockmate")
        starts = []
        for share in _SHARES:
            start_bytes = int(share * self._baseline_peak_bytes)
            if start_bytes <= max(budget_bytes, smallest[1].peak_bytes):
                break
            if start_bytes not in self._starts:
                self._starts[start_bytes] = self._forms.best_within(start_bytes, "rockmate")
            start = self._starts[start_bytes]
            starts += [] if start is None else [start]
        if smallest[1].peak_bytes > budget_bytes:
            starts.append(smallest)
        return starts

    def _moved(self, variant: Variant, candidate: Candidate, budget_bytes: int) -> Candidate | None:
        found = self._finder(variant).within(candidate.schedule, candidate.simulation, budget_bytes)
        if found is None:
            return None
        schedule, simulation = found
        return Candidate(schedule=schedule, simulation=simulation, is_proved=candidate.is_proved)

    def _finder(self, variant: Variant) -> MoveFinder:
        if variant not in self._finders:
            self._finders[variant] = MoveFinder(variant.graph, variant.costs, self._host_bytes)
        return self._finders[variant]
