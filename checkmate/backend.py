"""One run of HiGHS: the only file that names the solver, its options and its status.

With one thread and a fixed seed, the same program gives the same answer, unless the time limit
stops the solver.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import pulp

from checkmate.problem import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a solver's run. The program's variables hold the solution if there is one.

    Attributes:
        status: How much is proven.
        bound: A lower bound on the objective. Minus infinity if the solver gave none, infinity if
            it proved that there is no solution.
    """

    status: Status
    bound: float


def run(program: pulp.LpProblem, seconds: float) -> Outcome:
    """Run the solver once.

    Args:
        program: The program to minimize; its objective has no constant term.
        seconds: Wall time after which the solver stops.

    Returns:
        The status and the proven bound. PuLP's `status` reads Optimal after a time limit with an
        incumbent too. Only `sol_status` tells the difference.
    """
    if seconds <= 0:
        return Outcome(status=Status.NOT_FOUND, bound=-inf)
    bound = _solve(program, seconds)
    if program.status == pulp.LpStatusInfeasible or program.sol_status == pulp.LpSolutionInfeasible:
        return Outcome(status=Status.INFEASIBLE, bound=inf)
    status = {
        pulp.LpSolutionOptimal: Status.OPTIMAL,
        pulp.LpSolutionIntegerFeasible: Status.FEASIBLE,
    }.get(program.sol_status, Status.NOT_FOUND)
    if status is Status.OPTIMAL:
        assert program.objective is not None
        bound = sum(
            coefficient * (variable.value() or 0)
            for variable, coefficient in program.objective.items()
        )
    return Outcome(status=status, bound=bound)


def _solve(program: pulp.LpProblem, seconds: float) -> float:
    """Solve the program and return the dual bound."""
    solver = _SilentHighs(msg=False, threads=1, timeLimit=seconds, gapRel=0, random_seed=1)
    program.solve(solver)
    engine: Any = program.solverModel  # the `highspy.Highs` that PuLP leaves there
    bound = engine.getInfo().mip_dual_bound
    return bound if isfinite(bound) else -inf


class _SilentHighs(pulp.HiGHS):
    """HiGHS without its banner, which 1.16 prints before it can be told to be silent."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        with _no_output():
            super().createAndConfigureSolver(lp)


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Sends what libraries print to file descriptor 1 nowhere."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
