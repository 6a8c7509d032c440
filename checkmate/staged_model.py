"""The 0/1 program of the staged form: ops recomputed in stages, values retained between stages.

Symbols, as in Checkmate (Jain et al., MLSys 2020), section 4:

| paper | here | meaning |
|---|---|---|
| R_{t,i} | `R[t, i]` | op i runs in stage t; 1 for i = t, absent where it is 0 for sure |
| S_{t,i} | `S[t, v]` | value v, not op i, is retained from stage t-1 into stage t |
| C_i, M_v | `Op.time_ms`, `value_bytes` | time and size |
| U_{t,k} | a row for each (t, k) | in use while op k runs in stage t |
| FREE_{t,i,k} | `live(t, k, v)` less `live(t, k+1, v)` | value v is freed after op k of stage t |

With m the maker of v, `available(t, v) = S[t, v] + R[t, m]`. A value that is held or has no bytes
is always available.

    min   sum C_i R[t, i]  over i < t
    s.t.  R[t, i]     <= available(t, v)           op i of stage t reads v; equal to 1 for i = t
          S[t, v]     <= available(t-1, v)
          S[t, v] + R[t, m] <= 1                   retained or recomputed, not both
          sum M_v live(t, k, v) + overhead_k <= budget

The paper makes FREE a product of 0/1 variables, with rows to linearize it, and sums U up over k.
Liveness needs neither. After its maker's turn, a value is live if it is read later in the stage or
retained into the next one, since the first two rows make every read value available:

    live(t, k, v) = S[t, v]                        k before m
                    S[t, v] + R[t, m]              k = m
                    max(S[t+1, v], R[t, j], ...)   k after m, over readers j >= k

A continuous variable above each term is that maximum. There is one such variable for each distinct
tail of the readers, mostly none. Given R, the least S and live are 0/1 by themselves. S is declared
0/1 all the same, since solvers do far better if they may branch on it.

Variables and rows are left out if they are known:

* R of ops that cannot be recomputed, or whose values no later op can read;
* S that is always 1, or equal to its successor since no op can read v in that stage;
* rows that cannot be violated;
* the first stages, as long as all values fit that can be read later: to drop nothing is best there.

Costs are scaled to suit the solvers' tolerances. Times have a total of 1e6. Bytes of a row are
divided by their greatest common divisor and, if their total is still above 1e4, scaled to that
total. The budget is raised by 1e-7 of all bytes, which is less than one unit: a solver may
call a feasible program infeasible if a schedule exceeds a row by about its tolerance.
`solve_staged` replays the answer and cuts it off if it exceeds the budget.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import fsum, gcd, inf

from checkmate.backend import Outcome, Program, Variable
from checkmate.staged import StagedProblem

# Sum of all scaled times of a program.
_TIME_TOTAL = 1e6
# Largest sum of all scaled bytes of a row.
_BYTES_TOTAL = 1e4
# Slack of a row of bytes, in scaled units.
_BYTES_SLACK = 1e-3

Term = Variable | int
"""A variable, or its value 0 or 1 if that is known."""


class StagedModel:
    """The program for one budget, and the meaning of its variables.

    Attributes:
        program: The program; its cost is the time of recomputation, in units of `ms_per_unit`.
        R: The variables `R[t, i]`.
        ms_per_unit: Milliseconds in one unit of cost.
        is_infeasible: Whether a row is violated whatever the variables are.
    """

    def __init__(
        self, problem: StagedProblem, budget_bytes: int, *, first_recompute_op: int = 0
    ) -> None:
        """Build the program; none recomputes in the stages of ops before `first_recompute_op`."""
        self.problem = problem
        self.program = Program()
        self.is_infeasible = False
        self.ms_per_unit = (fsum(op.time_ms for op in problem.ops) or 1.0) / _TIME_TOTAL
        self._num_stages = len(problem.ops)
        self._permanent = {
            value
            for value in problem.maker
            if value in problem.held or not problem.value_bytes[value]
        }
        self._droppable = [value for value in sorted(problem.maker) if value not in self._permanent]
        self._readers: dict[int, list[int]] = {value: [] for value in self._droppable}
        for index, op in enumerate(problem.ops):
            for value in sorted(self._readers.keys() & set(op.inputs)):
                self._readers[value].append(index)
        self._last_wanted = self._find_last_wanted()
        self._first_tight = self._find_first_tight(budget_bytes)
        self._first_recompute = max(self._first_tight, first_recompute_op)
        self.R = {
            (stage, index): self.program.variable(op.time_ms / self.ms_per_unit, is_whole=True)
            for index, op in enumerate(problem.ops)
            if op.recomputable
            for stage in range(max(index + 1, self._first_recompute), self._last_run(index) + 1)
        }
        self._S = {
            (stage, value): term
            for value in self._droppable
            for stage, term in self._retained(value)
        }
        self._tails: dict[tuple[int, int, int], Term] = {}
        for stage in range(self._first_tight, self._num_stages):
            self._link(stage)
            self._bound_peak(stage, budget_bytes)

    # --- known values ---

    def _find_last_wanted(self) -> dict[int, int]:
        """For each value, the last stage in which it can be read; -1 if no op reads it."""
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
        """The last stage in which a recomputation of an op can be of use."""
        read = self._readers.keys() & set(self.problem.ops[index].outputs)
        return max((self._last_wanted[value] for value in read), default=-1)

    def _find_first_tight(self, budget_bytes: int) -> int:
        """The first stage that does not fit if all values are retained that can be read later."""
        size, maker = self.problem.value_bytes, self.problem.maker
        for stage, op in enumerate(self.problem.ops):
            wanted = (v for v in self._droppable if maker[v] < stage <= self._last_wanted[v])
            used = sum(size[v] for v in (*wanted, *op.outputs)) + op.overhead_bytes
            if used + self._held_bytes(stage) > budget_bytes:
                return stage
        return self._num_stages

    def _held_bytes(self, stage: int) -> int:
        """The bytes of permanent values that are made before a stage."""
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
                following = self.program.variable(is_whole=True)
            yield stage, following

    # --- terms ---

    def _reads(self, stage: int, value: int, start: int = 0) -> list[int]:
        """The readers of a value from `start` on that can run in a stage."""
        return [
            j for j in self._readers[value] if start <= j and (j == stage or (stage, j) in self.R)
        ]

    def _run(self, stage: int, index: int) -> Term:
        """R, with its known values."""
        return 1 if stage == index else self.R.get((stage, index), 0)

    def _available(self, stage: int, value: int) -> list[Term]:
        """Terms whose sum, 0 or 1, is whether a value is available after its maker's turn."""
        return [self._S.get((stage, value), 0), self._run(stage, self.problem.maker[value])]

    def _tail(self, stage: int, value: int, start: int) -> Term:
        """Whether a value is read from op `start` of a stage on: the maximum of those terms."""
        reads = self._reads(stage, value, start)
        following = self._S.get((stage + 1, value), 0)
        if stage in reads or following == 1:
            return 1
        if not reads:
            return following
        key = (stage, value, reads[0])
        if key not in self._tails:
            later = self._tail(stage, value, reads[0] + 1)
            if later == 0:
                self._tails[key] = self.R[stage, reads[0]]
            else:
                tail = self.program.variable()
                self._at_most([self.R[stage, reads[0]]], [tail])
                self._at_most([later], [tail])
                self._tails[key] = tail
        return self._tails[key]

    def _live(self, stage: int, index: int) -> dict[int, list[Term]]:
        """For each value that can be live during an op of a stage, terms whose sum tells it."""
        maker = self.problem.maker
        live: dict[int, list[Term]] = {}
        for value in self._droppable:
            if maker[value] == index:
                live[value] = self._available(stage, value)
            elif maker[value] < stage <= self._last_wanted[value]:
                is_before = index < maker[value]
                term = self._S[stage, value] if is_before else self._tail(stage, value, index)
                live[value] = [term]
        return live

    # --- rows ---

    def _at_most(self, low: Iterable[Term], high: Iterable[Term], limit: float = 0) -> None:
        """Add the row `sum low <= sum high + limit`, unless it always holds."""
        coefficients: dict[Variable, float] = {}
        for terms, sign in ((low, 1), (high, -1)):
            for term in terms:
                if isinstance(term, int):
                    limit -= sign * term
                else:
                    coefficients[term] = coefficients.get(term, 0) + sign
        self._add(coefficients, limit)

    def _add(self, coefficients: dict[Variable, float], limit: float) -> None:
        """Add the row `sum <= limit`, unless it always holds."""
        if sum(coefficient for coefficient in coefficients.values() if coefficient > 0) <= limit:
            return
        if not any(coefficients.values()):
            self.is_infeasible = True
            return
        self.program.at_most(coefficients, limit)

    def _link(self, stage: int) -> None:
        """Inputs of running ops are available, and retained values were available."""
        for index in [i for i in range(stage + 1) if self._run(stage, i) != 0]:
            op = self.problem.ops[index]
            for value in sorted(self._readers.keys() & set(op.inputs)):
                self._at_most([self._run(stage, index)], self._available(stage, value))
        for value in self._droppable:
            if self.problem.maker[value] < stage <= self._last_wanted[value]:
                retained, following = self._S[stage, value], self._S.get((stage + 1, value), 0)
                self._at_most(self._available(stage, value), [1])
                if following is not retained:
                    self._at_most([following], self._available(stage, value))

    def _bound_peak(self, stage: int, budget_bytes: int) -> None:
        """The bytes in use during each op of a stage are within the budget."""
        sizes = self.problem.value_bytes
        for index in range(stage + 1):
            run = self._run(stage, index)
            if run == 0:
                continue
            coefficients: dict[Variable, int] = {}
            left, most = budget_bytes - self._held_bytes(stage), 0
            op, live = self.problem.ops[index], self._live(stage, index)
            beside = op.overhead_bytes + sum(sizes[v] for v in op.outputs if v in self._permanent)
            for size, terms in [(beside, [run]), *((sizes[v], live[v]) for v in live)]:
                variables = [term for term in terms if not isinstance(term, int)]
                if any(term == 1 for term in terms):
                    left -= size
                elif variables:
                    most += size
                    for variable in variables:
                        coefficients[variable] = coefficients.get(variable, 0) + size
            if most > left:
                self._add_bytes(coefficients, left)

    def _add_bytes(self, coefficients: dict[Variable, int], limit: int) -> None:
        """Add a row of bytes, scaled."""
        unit = gcd(*coefficients.values()) or 1
        scale = min(1.0, _BYTES_TOTAL / (sum(coefficients.values()) // unit or 1))
        row = {variable: size // unit * scale for variable, size in coefficients.items() if size}
        if limit < 0:
            self.is_infeasible = True
        else:
            self._add(row, limit // unit * scale + _BYTES_SLACK)

    # --- answers ---

    def steps(self, outcome: Outcome) -> list[int]:
        """The runs in order, stage by stage, of a solution."""
        recomputed: list[list[int]] = [[] for _ in range(self._num_stages)]
        for (stage, index), variable in sorted(self.R.items()):
            if round(outcome.value(variable)):
                recomputed[stage].append(index)
        return [index for stage, runs in enumerate(recomputed) for index in (*runs, stage)]

    def forbid(self, stage: int, index: int, values: Sequence[int]) -> None:
        """Cut off answers in which all `values` are live while op `index` runs in `stage`."""
        live = self._live(stage, index)
        parts = [[self._run(stage, index)], *(live[value] for value in values if value in live)]
        self._at_most((term for part in parts for term in part), [], len(parts) - 1)
