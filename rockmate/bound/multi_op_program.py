"""Least recompute time when several program points bind: a 0/1 program, or its relaxation.

**Problem.** Given program points b_1, b_2, ... in the order in which they run, and a budget, find
the least recompute time of all schedules in which the points come in this order. One point alone is
the knapsack of `bound.lower_bound`. With several, a value evicted for one point, read before the
next and evicted for that one as well is paid for twice.

**Program.** The stretch of b_i goes from its run to that of b_(i+1), or to the end of the step.

| symbol | in the code | meaning |
|---|---|---|
| b_i | `points[i]` | program point i |
| Z_i | `_Stretch.saved` | values that are live at b_i, to be read after it |
| Q_i | `_Stretch.recompute` | ops that run in the stretch of b_i |
| - | `_Stretch.state` | ops whose state is live at b_i, for a recomputation after it |
| late_i | `_Stretch.late` | backward ops without an order against b_i that run after it |
| waiting_i | `_Stretch._waiting_bytes` | gradients live at b_i, if that depends on the order |
| Q_i to Q_j | `_recompute_in` | ops that run in the stretch of b_i or of one that follows, to b_j |
| A_i(v) | `_Stretch.availability` | value v is saved at b_i or recomputed in its stretch |

The variables Q_i to Q_j follow from others. Their rows keep the relaxation from falling below that
of fewer points: without them runs are shared out between stretches, half in each.

**Relaxation.** As for one point: memory between the points, and the order of runs in a stretch, are
left out. Without whole numbers the optimum is at most as large, so it is a bound as well, and takes
a small part of the time.

**Complexity.** A 0/1 program with about one variable for each op and value in each stretch, solved
by HiGHS or CBC. If the time limit ends it, the solver's proven bound counts.

**Not done.** Choosing the points and their orders: `bound.lower_bound` does that. The proof that no
schedule takes less is in docs/internals/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import combinations, pairwise
from math import inf

import pulp

from checkmate import Status
from checkmate.backend import has_highs, run
from rockmate.bound.program_point import ProgramPoint
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Op, Phase, Storage

# Slack of the byte limits, and the share of all recompute time deducted from the optimum. It is
# above the solvers' own tolerances, so that rounding cuts off no schedule.
_FEASIBILITY_TOLERANCE = 1e-6
# Time of all runs together in the program. Solvers stop within an absolute 1e-6 of the optimum, so
# times are scaled to this total.
_SCALED_TOTAL = 1e4

Term = pulp.LpVariable | pulp.LpAffineExpression | int


def min_recompute_ms(
    ops: Sequence[Op],
    costs: Costs,
    points: Sequence[ProgramPoint],
    *,
    budget_bytes: int,
    readers: Mapping[Storage, Sequence[Op]],
    free: Collection[Op] = (),
    is_relaxed: bool,
    time_limit_s: float,
) -> tuple[float, bool]:
    """Recompute time that every schedule needs in which the points come in this order.

    Args:
        ops: forward and late ops in order.
        costs: costs of the ops.
        points: the program points; all others run after the first in every schedule.
        budget_bytes: limit on the bytes in memory at each point.
        readers: readers of each storage.
        free: ops whose recomputation is paid for elsewhere.
        is_relaxed: solves the program without whole numbers.
        time_limit_s: seconds, after which the bound counts that the solver has proved so far, or 0.

    Returns:
        The time in milliseconds, infinite if there is no such schedule, and whether the program was
        solved to the end.
    """
    program = _Program(ops, costs, points, budget_bytes, readers, free, is_relaxed=is_relaxed)
    return program.solve(time_limit_s)


class _Stretch:
    """The variables of one program point and of the stretch from it to the next, or to the end.

    Attributes:
        live: storages that are live at the point in every schedule.
        saved: for each other value whether it is live at the point, to be read after it.
        recompute: for each recomputable op whether it runs in the stretch.
        state: for each op with a state whether the state is live at the point.
        late: for each backward op without an order against the point whether it runs after it.
    """

    def __init__(self, program: _Program, number: int) -> None:
        self._program = program
        self._number = number
        points = program.points
        self.live = points[number].live
        self.saved = {
            storage: self._variable("saved", storage.index)
            for op in program.ops
            for storage in op.writes
            if storage not in self.live
        }
        self.recompute = {op: self._variable("again", op.index) for op in program.recomputable}
        # In the last stretch, an op's state is live at the point if the op runs after it.
        self.state = self.recompute
        if number + 1 < len(points):
            self.state = {op: self._variable("state", op.index) for op in program.states}
        early = {op for point in points[: number + 1] for op in (*point.before, point.op)}
        self._early = dict.fromkeys(sorted(early, key=lambda op: op.index))
        self._after = {op for point in points[number:] for op in point.after}
        self._after.update(point.op for point in points[number + 1 :])
        # At the first point only the ops after it matter, all of which are ordered against it.
        unordered = [
            op
            for op in program.backward
            if number > 0 and op not in self._early and op not in self._after
        ]
        self.late = {op: self._variable("late", op.index) for op in unordered}

    def _variable(self, kind: str, index: int) -> pulp.LpVariable:
        return self._program.variable(f"{kind}_{self._number}_{index}")

    def is_late(self, op: Op) -> Term:
        """1 where a backward op runs after the point."""
        return self.late.get(op, int(op in self._after))

    def availability(self, storage: Storage, recompute: Mapping[Op, Term]) -> Term:
        """At least 1 where a value is live at the point or made by `recompute`."""
        if storage in self.live or storage not in self.saved:
            return 1
        assert storage.producer is not None
        return self.saved[storage] + recompute.get(storage.producer, 0)

    def bytes_at_point(self) -> pulp.LpAffineExpression:
        """Bytes live at the point, beside those of every schedule."""
        saved = pulp.lpSum(storage.num_bytes * saved for storage, saved in self.saved.items())
        states = pulp.lpSum(size * self.state[op] for op, size in self._program.states.items())
        return saved + states + (self._waiting_bytes() if self._number else 0)

    def _waiting_bytes(self) -> pulp.LpAffineExpression:
        """Bytes of further gradients that are made before the point and read after it.

        Adds the rows that say so, and that a reader runs after the point if its maker does.
        """
        program, readers, terms = self._program.program, self._program.readers, list[Term]()
        for maker in (*self.late, *self._early):
            for storage in maker.writes:
                found = [reader for reader in readers.get(storage, ()) if reader in self.late]
                for reader in found if maker in self.late else ():
                    program += self.late[reader] >= self.late[maker]
                ends: list[Term] = [self.late[reader] for reader in found]
                if storage.is_kept_to_end or not self._after.isdisjoint(readers.get(storage, ())):
                    ends = [1]
                if storage in self.live or not storage.num_bytes or not ends:
                    continue
                is_waiting = self._variable("waiting", storage.index)
                for end in ends:
                    program += is_waiting + self.late.get(maker, 0) >= end
                terms.append(storage.num_bytes * is_waiting)
        return pulp.lpSum(terms)


class _Program:
    """The program of several points as PuLP rows.

    Attributes:
        program: the rows.
        ops: forward and late ops in order.
        points: the program points.
        readers: readers of each storage.
        backward: backward ops that run after the first point.
        recomputable: ops that may run after the first point.
        states: bytes of the state of each op that has one.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        costs: Costs,
        points: Sequence[ProgramPoint],
        budget_bytes: int,
        readers: Mapping[Storage, Sequence[Op]],
        free: Collection[Op] = (),
        *,
        is_relaxed: bool,
    ) -> None:
        self.program = pulp.LpProblem("program_points", pulp.LpMinimize)
        self._is_relaxed = is_relaxed
        self._free = frozenset(free)
        self._costs = costs
        self._budget_bytes = budget_bytes
        self.ops = ops
        self.points = points
        self.readers = readers
        self.backward = points[0].after
        self.recomputable = [
            op for op in ops if op.phase is Phase.LATE or op.recompute_target is not None
        ]
        self.states = {
            op: op.recompute_state_bytes
            for op in self.recomputable
            if op.phase is Phase.FORWARD and op.recompute_state_bytes
        }
        self._stretches = [_Stretch(self, number) for number in range(len(points))]
        self._add_rows()

    def variable(self, name: str) -> pulp.LpVariable:
        """A further variable, 0 or 1; in the relaxation anything between."""
        kind = pulp.LpContinuous if self._is_relaxed else pulp.LpBinary
        return self.program.add_variable(name, 0, 1, cat=kind)

    def solve(self, time_limit_s: float) -> tuple[float, bool]:
        """As `min_recompute_ms`."""
        outcome = run(self.program, time_limit_s, "highs" if has_highs() else "cbc")
        if outcome.status is Status.INFEASIBLE:
            return inf, True
        tolerance_ms = _FEASIBILITY_TOLERANCE * self._total_ms
        least_ms = max(0.0, outcome.bound / self._scale - tolerance_ms)
        return least_ms, outcome.status is Status.OPTIMAL

    @cached_property
    def _recompute_ms(self) -> dict[Op, float]:
        return {
            op: self._costs.recompute[op.index].time_ms
            for op in self.recomputable
            if op.phase is Phase.FORWARD and op not in self._free
        }

    @cached_property
    def _total_ms(self) -> float:
        return len(self._stretches) * sum(self._recompute_ms.values())

    @property
    def _scale(self) -> float:
        return _SCALED_TOTAL / max(self._total_ms, 1e-9)

    def _add_rows(self) -> None:
        objective = [
            stretch.recompute[op] * (ms * self._scale)
            for stretch in self._stretches
            for op, ms in self._recompute_ms.items()
        ]
        self.program.setObjective(pulp.lpSum(objective))
        for stretch, point in zip(self._stretches, self.points, strict=True):
            self._limit_bytes(stretch.bytes_at_point(), self._budget_bytes - point.min_bytes)
        for stretch, following in pairwise(self._stretches):
            for op, is_late in following.late.items():
                self._add_row(stretch.is_late(op), is_late)
        for begin, end in combinations(range(len(self._stretches) + 1), 2):
            self._add_reads(begin, end)

    def _limit_bytes(self, total: pulp.LpAffineExpression, room_bytes: int) -> None:
        """Limits the bytes at a point, in shares of the room, with the tolerance as slack."""
        scale = 1 / max(room_bytes, 1)
        self.program += total * scale <= max(room_bytes, 0) * scale + _FEASIBILITY_TOLERANCE

    def _add_reads(self, begin: int, end: int) -> None:
        """Demands each value that is read between two points, or from one to the end of the step.

        It is saved at the first point or recomputed in between.
        """
        stretch, recompute = self._stretches[begin], self._recompute_in(begin, end)
        for op in self.states if stretch.state is not stretch.recompute else ():
            self.program += stretch.state[op] >= recompute[op]
        rows: dict[tuple[Storage, Op | None], Term] = {
            (storage, op): runs for op, runs in recompute.items() for storage in op.reads
        }
        for op in self.backward:
            is_between = self._is_after(begin, op) - self._is_after(end, op)
            if not isinstance(is_between, int):
                rows.update({(storage, op): is_between for storage in op.reads})
            elif is_between:
                rows.update({(storage, None): 1 for storage in op.reads})
        for (storage, _), runs in rows.items():
            self._add_row(stretch.availability(storage, recompute), runs)
        if end < len(self._stretches):
            for storage, saved in self._stretches[end].saved.items():
                self._add_row(stretch.availability(storage, recompute), saved)

    def _recompute_in(self, begin: int, end: int) -> dict[Op, pulp.LpVariable]:
        """For each op whether it runs between two points, or from one to the end of the step."""
        if end == begin + 1:
            return self._stretches[begin].recompute
        found = {op: self.variable(f"again_{begin}_{end}_{op.index}") for op in self.recomputable}
        for op, runs in found.items():
            recompute = [stretch.recompute[op] for stretch in self._stretches[begin:end]]
            for one in recompute:
                self.program += runs >= one
            self.program += runs <= pulp.lpSum(recompute)
        return found

    def _is_after(self, number: int, op: Op) -> Term:
        """1 where a backward op runs after a point; none runs after the end of the step."""
        if 0 < number < len(self._stretches):
            return self._stretches[number].is_late(op)
        return int(number == 0)

    def _add_row(self, available: Term, wanted: Term) -> None:
        """Adds `available` >= `wanted`, unless it holds in any case."""
        if not isinstance(available, int) and not (isinstance(wanted, int) and wanted <= 0):
            self.program += available >= wanted
