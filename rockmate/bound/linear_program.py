"""A linear program of a lower bound: what is added up for one, and how its optimum is read.

A solver's tolerances must not cut off a schedule. So byte limits are a little loose, and a little
is deducted from the optimum.
"""

from __future__ import annotations

from math import inf

import pulp

from checkmate import Status
from checkmate.backend import run

# Slack of the byte limits, and the share of the total time deducted from the optimum: above the
# solvers' own tolerances.
_TOLERANCE = 1e-6
# The total time in a program. Solvers stop within an absolute 1e-6 of the optimum.
_SCALED_TOTAL = 1e4
# Seconds for one program. This is several times what one takes, so that a busy machine seldom
# changes the answer.
_TIME_LIMIT_S = 10.0


class LinearProgram:
    """Variables between 0 and 1, rows, and the least time.

    Args:
        total_ms: the time that the tolerance refers to.

    Attributes:
        rows: the program in PuLP; times in it are multiplied by `scale`.
        scale: of times.
    """

    def __init__(self, total_ms: float) -> None:
        self.rows = pulp.LpProblem("bound", pulp.LpMinimize)
        self.scale = _SCALED_TOTAL / max(total_ms, 1e-9)
        self._tolerance_ms = _TOLERANCE * total_ms

    def variable(self, name: str) -> pulp.LpVariable:
        """A variable between 0 and 1."""
        return self.rows.add_variable(name, 0, 1)

    def limit_bytes(self, total: pulp.LpAffineExpression, room_bytes: int) -> None:
        """Limits a sum of bytes, in shares of the room, with the tolerance as slack."""
        scale = 1 / max(room_bytes, 1)
        self.rows += total * scale <= max(room_bytes, 0) * scale + _TOLERANCE

    def least_ms(self) -> float:
        """The least time; infinite if nothing satisfies the rows.

        If the limit ends the solve, what the solver has proved counts, or 0.
        """
        outcome = run(self.rows, _TIME_LIMIT_S)
        if outcome.status is Status.INFEASIBLE:
            return inf
        return max(0.0, outcome.bound / self.scale - self._tolerance_ms)
