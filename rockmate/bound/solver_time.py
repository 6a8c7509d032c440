"""The time that solvers may take, shared out over problems of which nobody knows beforehand how hard they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

_SHARE = 0.5  # of what is left, for one solve: a hard problem leaves something for all that come after it
_LEAST_S = (
    1e-3  # for a solve that comes too late: the solvers then answer from what takes polynomial time
)


class SolverTime:
    """Wall time for many solves together.

    Attributes:
        limit_s: for all of them, in seconds; what a solver does in polynomial time once it is out of time comes on top.
        spent_s: taken by those that have run.
    """

    def __init__(self, limit_s: float) -> None:
        """`ValueError` if there is none."""
        if not limit_s > 0:
            msg = f"time_limit_s is {limit_s}; it must be above 0"
            raise ValueError(msg)
        self.limit_s = limit_s
        self.spent_s = 0.0

    @contextmanager
    def for_one_solve(self) -> Iterator[float]:
        """Gives the seconds that the solve inside may take, half of what is left, and counts those that it takes."""
        begin = monotonic()
        try:
            yield max(_LEAST_S, _SHARE * (self.limit_s - self.spent_s))
        finally:
            self.spent_s += monotonic() - begin
