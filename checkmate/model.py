"""The 0/1 program of a `Knapsack`, in PuLP.

Symbols, as in Checkmate (Jain et al., MLSys 2020), with its T = 1:

| paper | here | meaning |
|---|---|---|
| R_o | `R[o]` | op o is recomputed |
| S_v | `S[v]` | value v is saved |
| C_o | `Op.time_ms` | its time |
| M_v | `Knapsack.value_bytes` | its size |

    min   sum C_o R_o s.t.  R_o <= S_v + R_maker(v)      for each v that op o reads and that is
    neither given nor forced
          1   <= S_v + R_maker(v)      for each such v that is required
          sum M_v S_v <= limit         over values that are not forced

`S` could be continuous, but is declared binary, so that solvers branch on it. Costs are scaled to
suit the solvers' tolerances. Times have a total of 1e6. Bytes are divided by their greatest common
divisor and, if their total is still above 1e4, scaled to that total. The limit is raised by 1e-7 of
all bytes, which is less than one unit: CBC calls a feasible program infeasible if a plan exceeds a
row by about its tolerance. `solve` therefore rounds the solver's answer, counts its bytes again,
and cuts it off if it is above the limit.
"""

from dataclasses import dataclass
from math import fsum, gcd

import pulp

from checkmate.problem import Knapsack

# Sum of all scaled times of a program.
TIME_TOTAL = 1e6
# Largest sum of all scaled bytes of a row.
BYTES_TOTAL = 1e4
# Slack of a row of bytes, in scaled units.
BYTES_SLACK = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A program and its variables.

    Attributes:
        program: The program; its objective is the time.
        recompute: `R`, by op; an op that may not be recomputed has none.
        save: `S`, by value; a given or forced value has none.
        time: The scaled time.
        saved: The scaled saved bytes.
    """

    program: pulp.LpProblem
    recompute: dict[int, pulp.LpVariable]
    save: dict[int, pulp.LpVariable]
    time: pulp.LpAffineExpression
    saved: pulp.LpAffineExpression


def build(problem: Knapsack, max_saved_bytes: int) -> Model:
    """The program for one limit.

    Args:
        problem: The problem.
        max_saved_bytes: The limit on saved bytes, without forced values; at least 0.

    Returns:
        The program, with the time as its objective.
    """
    maker = {value: index for index, op in enumerate(problem.ops) for value in op.outputs}
    counted = [value for value in sorted(maker) if value not in problem.forced]
    program = pulp.LpProblem("knapsack", pulp.LpMinimize)
    R = {
        index: program.add_variable(f"R_{index}", cat=pulp.LpBinary)
        for index, op in enumerate(problem.ops)
        if op.recomputable
    }
    S = {value: program.add_variable(f"S_{value}", cat=pulp.LpBinary) for value in counted}
    available = {
        value: S[value] + R[maker[value]] if maker[value] in R else +S[value] for value in counted
    }

    scale = TIME_TOTAL / (fsum(op.time_ms for op in problem.ops) or 1.0)
    time = pulp.lpSum(
        problem.ops[index].time_ms * scale * variable for index, variable in R.items()
    )
    unit = gcd(*(problem.value_bytes[value] for value in counted)) or 1
    num_units = sum(problem.value_bytes[value] // unit for value in counted)
    shrink = min(1.0, BYTES_TOTAL / (num_units or 1))
    saved = pulp.lpSum(problem.value_bytes[value] // unit * shrink * S[value] for value in counted)

    program.setObjective(time)
    for value in sorted(problem.required & S.keys()):
        program.addConstraint(available[value] >= 1, f"required_{value}")
    for index in R:
        for value in sorted(S.keys() & problem.ops[index].inputs):
            program.addConstraint(available[value] >= R[index], f"op_{index}_reads_{value}")
    program.addConstraint(
        saved <= min(max_saved_bytes // unit, num_units) * shrink + BYTES_SLACK, "limit"
    )
    return Model(program=program, recompute=R, save=S, time=time, saved=saved)
