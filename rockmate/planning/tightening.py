"""Keeps track of which schedules have been improved for which budgets."""

from __future__ import annotations

from collections.abc import Callable

from rockmate.planning.candidate import Candidate, is_worth_refining
from rockmate.planning.refine import ScheduleRefiner
from rockmate.schedule.schedule import Schedule


class TriedStarts:
    """Improvements that are each tried once: among many budgets the same start comes up again, with the same outcome."""

    def __init__(self, improver: ScheduleRefiner) -> None:
        """Nothing has been tried."""
        self._improver = improver
        self._tried: set[tuple[Schedule, int]] = set()

    def improved(self, start: Candidate, budget_bytes: int, known_ms: float) -> Candidate | None:
        """What comes of `start`; None if that was tried before, or if it does not fit and cannot be made to or takes `known_ms`."""
        if (
            not is_worth_refining(start, budget_bytes, known_ms)
            or (start.schedule, budget_bytes) in self._tried
        ):
            return None
        self._tried.add((start.schedule, budget_bytes))
        return self._improver.improved(start, budget_bytes)


class TighteningPath:
    """Rungs at budgets that fall by one factor, from the peak of a schedule on. Which they are does not depend on what is asked for."""

    def __init__(
        self, top: Candidate, factor: float, improved: Callable[[Candidate, int], Candidate | None]
    ) -> None:
        """Nothing is brought down yet.

        Args:
            top: the schedule.
            factor: between one budget and the next, above 1; infinite for a ladder of the top alone.
            improved: a schedule and a smaller budget -> what it becomes there, None where it cannot be made to fit.
        """
        self._factor = factor
        self._improved = improved
        self._budgets = [top.peak_bytes]
        self._rungs: list[Candidate | None] = [top]

    def smallest_above(self, budget_bytes: int) -> Candidate | None:
        """The last rung that is not below the budget, None if the schedule could not be brought down so far.

        Raises:
            ValueError: the budget is not between 1 and the peak of the top.
        """
        return self._rungs[self._place_above(budget_bytes)]

    def largest_below(self, budget_bytes: int) -> Candidate | None:
        """The first rung below the budget, or None; errors as for `smallest_above`."""
        place = self._place_above(budget_bytes) + 1
        self._build(place)
        return self._rungs[place] if place < len(self._rungs) else None

    def _place_above(self, budget_bytes: int) -> int:
        if not 1 <= budget_bytes <= self._budgets[0]:
            raise ValueError(
                f"a budget of {budget_bytes:,} bytes is not between 1 and the {self._budgets[0]:,} of the ladder's top"
            )
        while int(self._budgets[-1] / self._factor) >= budget_bytes:
            self._build(len(self._rungs))
        return max(place for place, budget in enumerate(self._budgets) if budget >= budget_bytes)

    def _build(self, place: int) -> None:
        """Rungs up to that at `place`, as far as there are any."""
        while len(self._rungs) <= place and (next_bytes := int(self._budgets[-1] / self._factor)):
            last = self._rungs[-1]
            self._budgets.append(next_bytes)
            self._rungs.append(None if last is None else self._improved(last, next_bytes))
