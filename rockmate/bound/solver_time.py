"""Wall time shared by many solves, whose difficulty is not known beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

# Share of the remaining time that one solve gets: a hard problem leaves time for those after it.
_SHARE = 0.5
# Seconds for a solve that comes too late: solvers then answer from what takes polynomial time.
_LEAST_S = 1e-3


class SolverTime:
    """One time limit for many solves together.

    A solver that is out of time still does what takes polynomial time, on top of the limit.

    Attributes:
        limit_s: seconds for all solves together.
        spent_s: seconds that solves have taken so far.
        cut_short: for each solve that took all the time it was given, so has no proof, one entry.
    """

    def __init__(self, limit_s: float) -> None:
        """Starts with nothing spent.

        Args:
            limit_s: seconds for all solves together.

        Raises:
            ValueError: the limit is not above 0.
        """
        if not limit_s > 0:
            msg = f"time_limit_s is {limit_s}; it must be above 0"
            raise ValueError(msg)
        self.limit_s = limit_s
        self.spent_s = 0.0
        self.cut_short: list[float] = []

    def restarted(self) -> SolverTime:
        """The same limit with nothing spent.

        For questions whose answer must not depend on which questions were asked before.
        """
        restarted = SolverTime(self.limit_s)
        restarted.cut_short = self.cut_short
        return restarted

    @contextmanager
    def for_one_solve(self) -> Iterator[float]:
        """Gives the seconds that the solve inside may take, and counts those that it takes.

        It may take half of the remaining time.
        """
        begin = monotonic()
        given_s = max(_LEAST_S, _SHARE * (self.limit_s - self.spent_s))
        try:
            yield given_s
        finally:
            taken_s = monotonic() - begin
            self.spent_s += taken_s
            if taken_s > given_s:
                self.cut_short.append(taken_s)
