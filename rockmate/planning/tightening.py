"""Tightens one schedule through a geometric sequence of budgets; the results are cached.

A homotopy in the budget: small steps let greedy evictions end at better schedules than one large
step does.
"""

from __future__ import annotations

from collections.abc import Callable

from rockmate.planning.candidate import Candidate


class TighteningPath:
    """The schedules of a path, at budgets that fall by one factor from the peak of the first.

    The budgets depend on the first schedule alone, so the path is the same whatever is asked for.

    Args:
        start: the first schedule.
        factor: ratio between neighbouring budgets, above 1. Infinite for a path of the start alone.
        improve: makes a schedule fit a smaller budget; None if that fails.
    """

    def __init__(
        self,
        start: Candidate,
        factor: float,
        improve: Callable[[Candidate, int], Candidate | None],
    ) -> None:
        self._factor = factor
        self._improve = improve
        self._budgets = [start.peak_bytes]
        self._schedules: list[Candidate | None] = [start]

    def smallest_above(self, budget_bytes: int) -> Candidate | None:
        """The last schedule whose budget is not below `budget_bytes`; None if the path ends before.

        Raises:
            ValueError: the budget is not between 1 and the peak of the first schedule.
        """
        return self._schedules[self._index_above(budget_bytes)]

    def largest_below(self, budget_bytes: int) -> Candidate | None:
        """The first schedule with a budget below `budget_bytes`; None if the path ends before.

        Raises:
            ValueError: the budget is not between 1 and the peak of the first schedule.
        """
        index = self._index_above(budget_bytes) + 1
        self._extend_to(index)
        return self._schedules[index] if index < len(self._schedules) else None

    def _index_above(self, budget_bytes: int) -> int:
        if not 1 <= budget_bytes <= self._budgets[0]:
            raise ValueError(
                f"the budget is {budget_bytes:,} bytes; it must be at least 1 and at most the peak "
                f"of the path's first schedule, {self._budgets[0]:,} bytes"
            )
        while int(self._budgets[-1] / self._factor) >= budget_bytes:
            self._extend_to(len(self._schedules))
        return max(index for index, budget in enumerate(self._budgets) if budget >= budget_bytes)

    def _extend_to(self, index: int) -> None:
        """Computes the path up to an index, or to its end at a budget of 0 bytes."""
        while len(self._schedules) <= index:
            next_bytes = int(self._budgets[-1] / self._factor)
            if not next_bytes:
                return
            last = self._schedules[-1]
            self._budgets.append(next_bytes)
            self._schedules.append(None if last is None else self._improve(last, next_bytes))
