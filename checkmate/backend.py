"""One run of an ILP solver: the only file that names solvers, their options and their status.

* `"cbc"`: the CBC that ships with PuLP, in its own process; always available.
* `"highs"`: HiGHS, in this process; available if `highspy` is installed.

With one thread and fixed seeds, the same program gives the same answer, unless the time limit stops
the solver.
"""

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import pulp

from checkmate.problem import Status

SOLVERS = ("cbc", "highs")

_CBC_BOUND_RESOLUTION = 1e-3
"""Resolution, in units of the objective, of the bound that CBC prints."""


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


def check_backend(backend: str) -> None:
    """Refuse a backend that cannot be used.

    Raises:
        ValueError: The backend is unknown or not installed.
    """
    if backend not in SOLVERS:
        raise ValueError(f"backend is {backend!r}; known are {', '.join(SOLVERS)}")
    if backend == "highs" and not has_highs():
        raise ValueError(
            "backend is 'highs', but highspy is not installed; install it or choose 'cbc'"
        )


def has_highs() -> bool:
    """Whether HiGHS can be used."""
    return importlib.util.find_spec("highspy") is not None


def run(program: pulp.LpProblem, seconds: float, backend: str) -> Outcome:
    """Run a solver once.

    Args:
        program: The program to minimize; its objective has no constant term.
        seconds: Wall time after which the solver stops.
        backend: One of `SOLVERS`.

    Returns:
        The status and the proven bound. PuLP's `status` reads Optimal after a time limit with an
        incumbent too. Only `sol_status` tells the difference.
    """
    if seconds <= 0:
        return Outcome(status=Status.NOT_FOUND, bound=-inf)
    begin = monotonic()
    bound = _run_cbc(program, seconds) if backend == "cbc" else _run_highs(program, seconds)
    # CBC's "integer infeasible" leaves `sol_status` at 0.
    if program.status == pulp.LpStatusInfeasible or program.sol_status == pulp.LpSolutionInfeasible:
        # CBC's presolve says "infeasible" too when the clock stops it. So it counts within the
        # limit only.
        if monotonic() - begin >= seconds:
            return Outcome(status=Status.NOT_FOUND, bound=-inf)
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


def _run_cbc(program: pulp.LpProblem, seconds: float) -> float:
    """Run CBC and return the bound that it prints when it stops early."""
    with TemporaryDirectory(prefix="checkmate-") as folder:
        log = Path(folder) / "cbc.log"
        # No `threads=1`: it starts a worker thread, which sometimes hangs until the time limit.
        # Without it, CBC is serial. PULP_CBC_CMD itself warns of its removal, so its binary is
        # named instead.
        solver = pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path,
            msg=False,
            timeLimit=seconds,
            gapRel=0,
            logPath=str(log),
            options=["randomSeed 1", "randomCbcSeed 1"],
        )
        program.solve(solver)
        printed = re.findall(r"^Lower bound:\s+(\S+)$", log.read_text(), re.MULTILINE)
    bound = float(printed[-1]) - _CBC_BOUND_RESOLUTION if printed else -inf
    return bound if abs(bound) < 1e40 else -inf


def _run_highs(program: pulp.LpProblem, seconds: float) -> float:
    """Run HiGHS and return its dual bound."""
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
