"""The program of the staged form: which op runs again in which stage, and which values wait from stage to stage.

Symbols, as in Checkmate (Jain et al., MLSys 2020), section 4:

| paper | here | meaning |
|---|---|---|
| R_{t,i} | `R[t, i]` | op i runs in stage t; 1 for i = t, absent where it is 0 for sure |
| S_{t,i} | `S[t, v]` | value v is retained from stage t-1 into stage t: by value, since an op may make several |
| C_i, M_v | `Op.time_ms`, `value_bytes` | time and size |
| U_{t,k} | a row for each (t, k) | in use while op k runs in stage t |
| FREE_{t,i,k} | `live(t, k, v)` less `live(t, k+1, v)` | value v is freed after op k of stage t |

With m the maker of v, `at hand(t, v) = S[t, v] + R[t, m]`, and a value that stays or has no bytes always at hand:

    min   sum C_i R[t, i]  over i < t
    s.t.  R[t, i]     <= at hand(t, v)             op i of stage t reads v; equal to 1 for i = t
          S[t, v]     <= at hand(t-1, v)
          S[t, v] + R[t, m] <= 1                   retained or made anew: nobody reads the old one
          sum M_v live(t, k, v) + overhead_k <= budget

The paper makes FREE a product of 0/1 variables with rows to linearize it, and sums U up over k. Liveness needs neither:
after its maker's turn a value is live if it is read later in the stage or retained into the next one, since the first two
rows see to it that what is wanted is there,

    live(t, k, v) = S[t, v]                        k before m
                    S[t, v] + R[t, m]              k = m
                    max(S[t+1, v], R[t, j], ...)   k after m, over readers j >= k

and a continuous variable above each term is that maximum. It has one such variable for each distinct tail of the
readers, mostly none. Given R, the least S and live are 0/1 by themselves; S is declared 0/1 all the same, for solvers do
far better when they may branch on it.

Left out because they are known: R of ops that cannot run again, or whose values nobody can want any more; S that is
1 in any case, or equal to its successor since nobody can read v in that stage; rows that cannot be violated; and the
first stages, as long as everything fits that can ever be read again, for there it is best to drop nothing.

Bytes and times are scaled as in `checkmate.model`, and the budget is a hair loose for the same reason: `solve_staged`
replays the answer and cuts it off if it truly is above.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import fsum, gcd, inf

import pulp

from checkmate.staged import StagedProblem

_TIME_TOTAL = 1e6
_BYTES_TOTAL = 1e4
_SLACK = 1e-3

Term = pulp.LpVariable | int
"""A variable, or 0 or 1 where it is known."""


class StagedModel:
    """The program for one budget, and what its variables mean.

    Attributes:
        program: The program; its objective is the time beyond the first runs, in units of `ms_per_unit`.
        R: The variables `R[t, i]`.
        ms_per_unit: Milliseconds in one unit of the objective.
        num_binaries: How many variables are declared 0/1.
        is_infeasible: Whether a row is violated whatever the variables are.
    """

    def __init__(
        self, problem: StagedProblem, budget_bytes: int, *, first_recompute_op: int = 0
    ) -> None:
        """Build the program.

        Args:
            problem: All of its ops are needed.
            budget_bytes: Bound on the peak.
            first_recompute_op: Nothing is recomputed in the stages of earlier ops.
        """
        self.problem = problem
        self.program = pulp.LpProblem("staged", pulp.LpMinimize)
        self.is_infeasible = False
        self._num_stages = len(problem.ops)
        self._permanent = {
            value
            for value in problem.maker
            if value in problem.stays or not problem.value_bytes[value]
        }
        self._moving = [value for value in sorted(problem.maker) if value not in self._permanent]
        self._readers: dict[int, list[int]] = {value: [] for value in self._moving}
        for index, op in enumerate(problem.ops):
            for value in sorted(self._readers.keys() & set(op.inputs)):
                self._readers[value].append(index)
        self._last_wanted = self._find_last_wanted()
        self._first_tight = self._find_first_tight(budget_bytes)
        self._first_recompute = max(self._first_tight, first_recompute_op)
        self.R = {
            (stage, index): self.program.add_variable(f"R_{stage}_{index}", cat=pulp.LpBinary)
            for index, op in enumerate(problem.ops)
            if op.recomputable
            for stage in range(max(index + 1, self._first_recompute), self._last_run(index) + 1)
        }
        self._S = {
            (stage, value): term for value in self._moving for stage, term in self._retained(value)
        }
        self._tails: dict[tuple[int, int, int], Term] = {}
        for stage in range(self._first_tight, self._num_stages):
            self._link(stage)
            self._bound_peak(stage, budget_bytes)
        total_ms = fsum(op.time_ms for op in problem.ops)
        self.ms_per_unit = (total_ms or 1.0) / _TIME_TOTAL
        self.program.setObjective(
            pulp.LpAffineExpression(
                {
                    R: problem.ops[index].time_ms / self.ms_per_unit
                    for (_, index), R in self.R.items()
                }
            )
        )

    # What is known beforehand

    def _find_last_wanted(self) -> dict[int, int]:
        """For each value the last stage in which it can be read; -1 where nobody reads it."""
        last: dict[int, int] = {}
        run_until = list(range(self._num_stages))
        for index in reversed(range(self._num_stages)):
            op = self.problem.ops[index]
            for value in op.outputs:
                if value in self._readers:
                    last[value] = max(
                        (run_until[reader] for reader in self._readers[value]), default=-1
                    )
                    if op.recomputable:
                        run_until[index] = max(run_until[index], last[value])
        return last

    def _last_run(self, index: int) -> int:
        """The last stage in which another run of an op can be of use."""
        return max(
            (
                self._last_wanted[value]
                for value in self.problem.ops[index].outputs
                if value in self._readers
            ),
            default=-1,
        )

    def _find_first_tight(self, budget_bytes: int) -> int:
        """The first stage that does not fit when all that can ever be read again is retained."""
        size, maker = self.problem.value_bytes, self.problem.maker
        for stage, op in enumerate(self.problem.ops):
            wanted = (v for v in self._moving if maker[v] < stage <= self._last_wanted[v])
            used = (
                sum(size[v] for v in wanted) + sum(size[v] for v in op.outputs) + op.overhead_bytes
            )
            if used + self._staying_bytes(stage) > budget_bytes:
                return stage
        return self._num_stages

    def _staying_bytes(self, stage: int) -> int:
        """What stays and was made before a stage."""
        return sum(
            self.problem.value_bytes[v] for v in self._permanent if self.problem.maker[v] < stage
        )

    def _retained(self, value: int) -> Iterable[tuple[int, Term]]:
        """S of a value for each stage in which it can be read, last first."""
        maker = self.problem.maker[value]
        first_runs = self._readers[value]
        remade_from = (
            max(maker + 1, self._first_recompute) if self.problem.ops[maker].recomputable else inf
        )
        following: Term = 0
        for stage in range(self._last_wanted[value], maker, -1):
            position = bisect_left(first_runs, stage)
            is_read_unremade = position < len(first_runs) and first_runs[position] < remade_from
            if stage < self._first_tight or is_read_unremade:
                following = 1
            elif stage >= remade_from or self._reads(stage, value):
                following = self.program.add_variable(f"S_{stage}_{value}", cat=pulp.LpBinary)
            yield stage, following

    # Terms

    def _reads(self, stage: int, value: int, start: int = 0) -> list[int]:
        """The readers of a value from `start` on that can run in a stage."""
        return [
            j for j in self._readers[value] if start <= j and (j == stage or (stage, j) in self.R)
        ]

    def _run(self, stage: int, index: int) -> Term:
        """R, with its known values."""
        return 1 if stage == index else self.R.get((stage, index), 0)

    def _at_hand(self, stage: int, value: int) -> list[Term]:
        """Terms whose sum, at most 1, says whether a value is there once its maker's turn is over."""
        return [self._S.get((stage, value), 0), self._run(stage, self.problem.maker[value])]

    def _tail(self, stage: int, value: int, start: int) -> Term:
        """Whether a value is wanted from op `start` of a stage on: the maximum of those terms."""
        reads = self._reads(stage, value, start)
        following = self._S.get((stage + 1, value), 0)
        if stage in reads or _is(following, 1):
            return 1
        if not reads:
            return following
        key = (stage, value, reads[0])
        if key not in self._tails:
            later = self._tail(stage, value, reads[0] + 1)
            if _is(later, 0):
                self._tails[key] = self.R[stage, reads[0]]
            else:
                tail = self.program.add_variable(f"live_{stage}_{value}_{reads[0]}", 0, 1)
                self._at_most([self.R[stage, reads[0]]], [tail])
                self._at_most([later], [tail])
                self._tails[key] = tail
        return self._tails[key]

    def _live(self, stage: int, index: int) -> dict[int, list[Term]]:
        """For each value that can be live while an op runs in a stage, terms whose sum says whether it is."""
        maker = self.problem.maker
        live: dict[int, list[Term]] = {}
        for value in self._moving:
            if maker[value] == index:
                live[value] = self._at_hand(stage, value)
            elif maker[value] < stage <= self._last_wanted[value]:
                is_before = index < maker[value]
                live[value] = [
                    self._S[stage, value] if is_before else self._tail(stage, value, index)
                ]
        return live

    # Rows

    def _at_most(self, low: Iterable[Term], high: Iterable[Term], limit: float = 0) -> None:
        """Add the row `sum low <= sum high + limit`, unless it holds in any case."""
        coefficients: dict[pulp.LpVariable, float] = {}
        for terms, sign in ((low, 1), (high, -1)):
            for term in terms:
                if isinstance(term, int):
                    limit -= sign * term
                else:
                    coefficients[term] = coefficients.get(term, 0) + sign
        self._add(coefficients, limit)

    def _add(self, coefficients: dict[pulp.LpVariable, float], limit: float) -> None:
        """Add the row `sum <= limit`, unless it holds in any case."""
        if sum(coefficient for coefficient in coefficients.values() if coefficient > 0) <= limit:
            return
        if not any(coefficients.values()):
            self.is_infeasible = True
            return
        self.program.addConstraint(pulp.LpAffineExpression(coefficients) <= limit)

    def _link(self, stage: int) -> None:
        """What runs finds its inputs, and what is retained was there."""
        for index in [i for i in range(stage + 1) if not _is(self._run(stage, i), 0)]:
            op = self.problem.ops[index]
            for value in sorted(self._readers.keys() & set(op.inputs)):
                self._at_most([self._run(stage, index)], self._at_hand(stage, value))
        for value in self._moving:
            if self.problem.maker[value] < stage <= self._last_wanted[value]:
                retained, following = self._S[stage, value], self._S.get((stage + 1, value), 0)
                self._at_most(self._at_hand(stage, value), [1])
                if following is not retained:
                    self._at_most([following], self._at_hand(stage, value))

    def _bound_peak(self, stage: int, budget_bytes: int) -> None:
        """What is in use while each op of a stage runs is within the budget."""
        for index in range(stage + 1):
            run = self._run(stage, index)
            if _is(run, 0):
                continue
            coefficients: dict[pulp.LpVariable, int] = {}
            left, most = budget_bytes - self._staying_bytes(stage), 0
            beside = self.problem.ops[index].overhead_bytes
            beside += sum(
                self.problem.value_bytes[v]
                for v in self.problem.ops[index].outputs
                if v in self._permanent
            )
            parts = [
                (beside, [run]),
                *(
                    (self.problem.value_bytes[v], terms)
                    for v, terms in self._live(stage, index).items()
                ),
            ]
            for size, terms in parts:
                variables = [term for term in terms if not isinstance(term, int)]
                if any(_is(term, 1) for term in terms):
                    left -= size
                elif variables:
                    most += size
                    for variable in variables:
                        coefficients[variable] = coefficients.get(variable, 0) + size
            if most > left:
                self._add_bytes(coefficients, left)

    def _add_bytes(self, coefficients: dict[pulp.LpVariable, int], limit: int) -> None:
        """Add a row of bytes, scaled."""
        unit = gcd(*coefficients.values()) or 1
        scale = min(1.0, _BYTES_TOTAL / (sum(coefficients.values()) // unit or 1))
        row = {variable: size // unit * scale for variable, size in coefficients.items() if size}
        if limit < 0:
            self.is_infeasible = True
        else:
            self._add(row, limit // unit * scale + _SLACK)

    # Answers

    def stages(self) -> list[list[int]]:
        """The runs of each stage in order, from the values of the variables."""
        again: list[list[int]] = [[] for _ in range(self._num_stages)]
        for (stage, index), variable in sorted(self.R.items()):
            if round(variable.value() or 0):
                again[stage].append(index)
        return [[*runs, stage] for stage, runs in enumerate(again)]

    def forbid(self, stage: int, index: int, values: Sequence[int]) -> None:
        """Cut off every answer in which all of `values` are live while op `index` runs in `stage`."""
        live = self._live(stage, index)
        parts = [[self._run(stage, index)], *(live[value] for value in values if value in live)]
        self._at_most((term for part in parts for term in part), [], len(parts) - 1)


def _is(term: Term, known: int) -> bool:
    """Whether a term is known to be 0 or 1; `==` would make a row of a variable."""
    return isinstance(term, int) and term == known
