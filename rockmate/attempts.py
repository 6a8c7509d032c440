"""Keeps track of which schedules have been improved for which budgets."""

from __future__ import annotations

from rockmate.candidate import Candidate, is_worth_improving
from rockmate.improver import Improver
from rockmate.schedule import Schedule


class Attempts:
    """Improvements that are each tried once: among many budgets the same start comes up again, with the same outcome."""

    def __init__(self, improver: Improver) -> None:
        """Nothing has been tried."""
        self._improver = improver
        self._tried: set[tuple[Schedule, int]] = set()

    def improved(self, start: Candidate, budget_bytes: int, known_ms: float) -> Candidate | None:
        """What comes of `start`; None if that was tried before, or if it does not fit and cannot be made to or takes `known_ms`."""
        if (
            not is_worth_improving(start, budget_bytes, known_ms)
            or (start.schedule, budget_bytes) in self._tried
        ):
            return None
        self._tried.add((start.schedule, budget_bytes))
        return self._improver.improved(start, budget_bytes)
