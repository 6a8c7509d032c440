"""Linear programs, with whole numbers or without, and one run of HiGHS on them.

This is the only file that names the solver, its options and its status. With one thread and a fixed
seed, the same program gives the same answer, unless the time limit stops the solver.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import highspy

from checkmate.problem import Status


class Variable(NamedTuple):
    """A variable of a `Program`, at an index."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a solver's run.

    Attributes:
        status: How much is proven.
        bound: A lower bound on the cost. Minus infinity if the solver gave none, infinity if it
            proved that there is no solution.
        values: Of the variables, by index; empty if no solution was found.
    """

    status: Status
    bound: float
    values: tuple[float, ...] = ()

    def value(self, variable: Variable) -> float:
        """The value of a variable in the solution."""
        return self.values[variable.index]


class Program:
    """Variables, rows that limit sums of them, and the sum of their costs, which is to be least."""

    def __init__(self) -> None:
        """Without variables and rows."""
        self._columns: list[tuple[float, float, bool]] = []
        self._rows: list[tuple[dict[int, float], float]] = []

    def variable(self, cost: float = 0.0, *, most: float = 1.0, is_whole: bool = False) -> Variable:
        """A further variable, from 0 to `most`."""
        self._columns.append((cost, most, is_whole))
        return Variable(len(self._columns) - 1)

    def at_most(self, row: Mapping[Variable, float], limit: float) -> None:
        """Demands that a sum, given by its coefficients, is at most `limit`."""
        self._rows.append(({each.index: factor for each, factor in row.items() if factor}, limit))

    def solve(self, seconds: float) -> Outcome:
        """Runs the solver once, for so many seconds of wall time at most."""
        if seconds <= 0:
            return Outcome(status=Status.NOT_FOUND, bound=-inf)
        engine = self._engine(seconds)
        engine.run()
        info, found = engine.getInfo(), engine.getModelStatus()
        kinds = highspy.HighsModelStatus
        if found in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
            return Outcome(status=Status.INFEASIBLE, bound=inf)
        values = tuple(engine.getSolution().col_value)
        if found == kinds.kOptimal:
            bound = info.objective_function_value
            return Outcome(status=Status.OPTIMAL, bound=bound, values=values)
        bound = info.mip_dual_bound if isfinite(info.mip_dual_bound) else -inf
        if info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible):
            return Outcome(status=Status.FEASIBLE, bound=bound, values=values)
        return Outcome(status=Status.NOT_FOUND, bound=bound)

    def _engine(self, seconds: float) -> highspy.Highs:
        """The solver, with the program."""
        with _no_output():  # 1.16 prints a banner before it can be told to be silent
            engine = highspy.Highs()
        options = {"output_flag": False, "mip_rel_gap": 0.0, "threads": 1, "random_seed": 1}
        for name, value in {**options, "time_limit": float(seconds)}.items():
            engine.setOptionValue(name, value)
        for index, (cost, most, is_whole) in enumerate(self._columns):
            engine.addCol(cost, 0.0, most, 0, [], [])
            if is_whole:
                engine.changeColIntegrality(index, highspy.HighsVarType.kInteger)
        for row, limit in self._rows:
            engine.addRow(-inf, limit, len(row), [*row], [*row.values()])
        return engine


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
