"""Least recompute time when two program points bind: a linear program.

**Problem.** Given program points b_1 and b_2, of which b_2 runs after b_1 in every schedule, and a
budget, find a recompute time that every schedule needs. One point alone is the knapsack of
`bound.lower_bound`. With two, a value evicted for the first, read before the second and evicted for
that one as well is paid for twice.

**Program.** Stretch 1 goes from the run of b_1 to that of b_2, stretch 2 from there to the end of
the step.

| symbol | in the code | meaning |
|---|---|---|
| b_i | `first`, `second` | program point i |
| Z_i | `_saved` | values that are live at b_i, to be read after it |
| Q_1, Q_2, Q_12 | `_runs`, `_both` | ops that run in stretch 1, in stretch 2, in one of both |
| late | `_late` | backward ops without an order against b_2 that run after it |
| waiting | `_waiting_bytes` | gradients live at b_2, if that depends on the order |
| A_i(v) | `_demand` | value v is saved at b_i or recomputed in its stretch |

Q_12 follows from Q_1 and Q_2. Its rows keep the program from falling below that of b_1 alone:
without them runs are shared out between the stretches, half in each.

**Relaxation.** As for one point: memory between the points, and the order of runs in a stretch, are
left out. So are whole numbers.

**Complexity.** Two variables for each value and three for each op. HiGHS takes tenths of a second
for some hundred ops.

**Not done.** Whole numbers and a third point, which say up to half a percent more on convolutional
nets and take seconds. The proof that no schedule takes less is in docs/internals/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pulp

from rockmate.bound.linear_program import LinearProgram
from rockmate.bound.program_point import ProgramPoint
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Op, Phase, Storage

Term = pulp.LpVariable | pulp.LpAffineExpression | int


def min_recompute_ms(
    ops: Sequence[Op],
    costs: Costs,
    first: ProgramPoint,
    second: ProgramPoint,
    *,
    budget_bytes: int,
    readers: Mapping[Storage, Sequence[Op]],
    free: Collection[Op] = (),
) -> float:
    """Recompute time in milliseconds that two points demand; infinite if no schedule fits.

    Args:
        ops: forward and late ops in order.
        costs: costs of the ops.
        first: a program point.
        second: another one, which runs after it in every schedule.
        budget_bytes: limit on the bytes in memory at each point.
        readers: readers of each storage.
        free: ops whose recomputation is paid for elsewhere.
    """
    times_ms = {
        op: costs.recompute[op.index].time_ms
        for op in ops
        if op.phase is Phase.FORWARD and op.recompute_target is not None and op not in free
    }
    program = LinearProgram(2 * sum(times_ms.values()))
    _Pair(program, ops, (first, second), budget_bytes, readers).add_rows(times_ms)
    return program.least_ms()


class _Pair:
    """The variables and rows of two points.

    Args:
        program: takes them.
        ops: forward and late ops in order.
        points: the program points.
        budget_bytes: limit on the bytes in memory at each.
        readers: readers of each storage.
    """

    def __init__(
        self,
        program: LinearProgram,
        ops: Sequence[Op],
        points: tuple[ProgramPoint, ProgramPoint],
        budget_bytes: int,
        readers: Mapping[Storage, Sequence[Op]],
    ) -> None:
        self._program, self._points = program, points
        self._budget_bytes, self._readers = budget_bytes, readers
        recomputable = [
            op for op in ops if op.phase is Phase.LATE or op.recompute_target is not None
        ]
        self._states = {
            op: op.recompute_state_bytes
            for op in recomputable
            if op.phase is Phase.FORWARD and op.recompute_state_bytes
        }
        values = [storage for op in ops for storage in op.writes]
        self._saved = [
            {v: program.variable(f"saved_{i}_{v.index}") for v in values if v not in point.live}
            for i, point in enumerate(points)
        ]
        self._runs = [
            {op: program.variable(f"again_{i}_{op.index}") for op in recomputable} for i in (0, 1)
        ]
        self._both = {op: program.variable(f"again_{op.index}") for op in recomputable}
        first, second = points
        early = {*first.before, first.op, *second.before, second.op}
        self._early = sorted(early, key=lambda op: op.index)
        self._after = frozenset(second.after)
        self._late = {
            op: program.variable(f"late_{op.index}")
            for op in first.after
            if op not in early and op not in self._after
        }

    def add_rows(self, times_ms: Mapping[Op, float]) -> None:
        """Adds all rows, and the time of all runs as what is to be least."""
        rows, both = self._program.rows, self._both
        scale = self._program.scale
        terms = [runs[op] * (ms * scale) for runs in self._runs for op, ms in times_ms.items()]
        rows.setObjective(pulp.lpSum(terms))
        one, other = self._runs
        for op, runs in both.items():
            rows.addConstraint(runs >= one[op])
            rows.addConstraint(runs >= other[op])
            rows.addConstraint(runs <= one[op] + other[op])
        # A state is live until the last run of its op.
        for point, saved, runs in zip(self._points, self._saved, (both, other), strict=True):
            total = pulp.lpSum(storage.num_bytes * each for storage, each in saved.items())
            total += pulp.lpSum(size * runs[op] for op, size in self._states.items())
            total += self._waiting_bytes() if runs is other else 0
            self._program.limit_bytes(total, self._budget_bytes - point.min_bytes)
        backward = self._points[0].after
        is_late = {op: self._late.get(op, int(op in self._after)) for op in backward}
        is_early = {op: 1 - late for op, late in is_late.items()}
        self._demand(0, one, is_early)
        for storage, saved in self._saved[1].items():
            self._demand_value(0, one, storage, saved)
        self._demand(0, both, dict.fromkeys(backward, 1))
        self._demand(1, other, is_late)

    def _demand(self, point: int, runs: Mapping[Op, Term], backward: Mapping[Op, Term]) -> None:
        """Demands what ops read that run in a stretch, by backward ops as far as they are in it."""
        rows: dict[tuple[Storage, Op | None], Term] = {
            (storage, op): is_run for op, is_run in runs.items() for storage in op.reads
        }
        for op, is_in in backward.items():
            is_known = isinstance(is_in, int)
            if not is_known or is_in:
                rows |= {(storage, None if is_known else op): is_in for storage in op.reads}
        for (storage, _), wanted in rows.items():
            self._demand_value(point, runs, storage, wanted)

    def _demand_value(
        self, point: int, runs: Mapping[Op, Term], storage: Storage, wanted: Term
    ) -> None:
        """Has a value saved at a point or made by `runs`, unless it is live in any case."""
        if storage in self._saved[point]:
            assert storage.producer is not None
            made = runs.get(storage.producer, 0)
            self._program.rows.addConstraint(self._saved[point][storage] + made >= wanted)

    def _waiting_bytes(self) -> pulp.LpAffineExpression:
        """Bytes of further gradients that are made before the second point and read after it.

        Adds the rows that say so, and that a reader runs after the point if its maker does.
        """
        rows, live, terms = self._program.rows, self._points[1].live, list[Term]()
        for maker in (*self._late, *self._early):
            for storage in maker.writes:
                readers = self._readers.get(storage, ())
                found: list[Term] = [
                    self._late[reader] for reader in readers if reader in self._late
                ]
                if maker in self._late:
                    for reader in found:
                        rows.addConstraint(reader >= self._late[maker])
                is_needed = storage.is_kept_to_end or not self._after.isdisjoint(readers)
                ends: list[Term] = [1] if is_needed else found
                if storage in live or not storage.num_bytes or not ends:
                    continue
                waiting = self._program.variable(f"waiting_{storage.index}")
                for end in ends:
                    rows.addConstraint(waiting + self._late.get(maker, 0) >= end)
                terms.append(storage.num_bytes * waiting)
        return pulp.lpSum(terms)
