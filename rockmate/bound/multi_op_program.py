"""The least time to run again where several moments of the backward bind: a 0/1 program over what is in memory at each.

Each moment by itself is the knapsack of `rockmate/certificate.py`. What has to go at one moment and is wanted before the next has to go
again there: both are paid for. With moments b1, b2, ... in this order in the schedule, and the stretch of each from its run to the next:

| variable | meaning |
|---|---|
| saved_i[v] | value v is in memory while b_i runs, to be read after it |
| again_i[o] | op o runs again in the stretch of b_i |
| state_i[o] | what o keeps of its first run is in memory while b_i runs |
| late_i[x] | backward op x, which nothing puts before or behind b_i, runs after it |
| waiting_i[g] | gradient g is in memory while b_i runs, if that depends on where its maker or its readers stand |
| again_i_j[o] | op o runs again in the stretch of b_i or of one that follows, to b_j or to the end |

The last follows from others; its rows keep the program without whole numbers from being below that of fewer moments.

docs/internals/algorithms.md has the rows and the proof that no schedule takes less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import inf

import pulp

from checkmate import Status
from checkmate.backend import has_highs, run
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Op, Phase, Storage, state_bytes

_HAIR = 1e-6  # of a limit or of all time: above a solver's own tolerance
_TIME_TOTAL = 1e4  # of all runs together in the program: solvers end where they are within 1e-6 of the optimum

Term = pulp.LpVariable | pulp.LpAffineExpression | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment within a budget.

    Attributes:
        op: the backward op that runs.
        in_use: storages in memory then in every schedule.
        room_bytes: what the budget leaves beside them.
        before: backward ops that run before it in every schedule.
        after: those that run after it in every schedule.
    """

    op: Op
    in_use: Collection[Storage]
    room_bytes: int
    before: Collection[Op]
    after: Collection[Op]


def min_recompute_ms(
    ops: Sequence[Op],
    costs: Costs,
    instants: Sequence[Instant],
    *,
    readers: Mapping[Storage, Sequence[Op]],
    is_relaxed: bool,
    time_limit_s: float,
) -> tuple[float, bool]:
    """Time of further runs that no schedule in which the instants come in this order does without; and whether it is the optimum.

    Args:
        ops: forward and late ops in order.
        costs: of each op.
        instants: the moments, each of which runs after the first of them in every schedule.
        readers: of each storage.
        is_relaxed: without whole numbers, which takes a small part of the time and gives a little less.
        time_limit_s: after which the bound that the solver has proved so far counts, 0 if there is none.

    Returns:
        The time in milliseconds, infinite if there is no such schedule, and True if the program was solved to the end.
    """
    return _MomentProgram(ops, costs, instants, readers, is_relaxed=is_relaxed).solve(time_limit_s)


class _Stretch:
    """The part of a step from one moment to the next, or to the end: what is saved there, what runs again then, what comes later."""

    def __init__(self, program: _MomentProgram, number: int) -> None:
        self._program = program
        self._number = number
        instants = program.instants
        self.in_use = instants[number].in_use
        self.saved = {
            s: self._choose("saved", s.index)
            for op in program.ops
            for s in op.writes
            if s not in self.in_use
        }
        self.recompute = {op: self._choose("again", op.index) for op in program.repeatable}
        self.state = (
            {op: self._choose("state", op.index) for op in program.kept}
            if number + 1 < len(instants)
            else self.recompute
        )
        early = {op for other in instants[: number + 1] for op in (*other.before, other.op)}
        self._early = dict.fromkeys(sorted(early, key=lambda op: op.index))
        self._sure = {op for other in instants[number:] for op in other.after} | {
            other.op for other in instants[number + 1 :]
        }
        is_open = number > 0  # of what may run before the first moment nothing is said
        open_ops = (
            [op for op in program.backward if op not in self._early and op not in self._sure]
            if is_open
            else []
        )
        self.late = {op: self._choose("late", op.index) for op in open_ops}

    def _choose(self, what: str, index: int) -> pulp.LpVariable:
        return self._program.choose(f"{what}_{self._number}_{index}")

    def is_late(self, op: Op) -> Term:
        """1 where a backward op runs after the moment."""
        return self.late.get(op, int(op in self._sure))

    def has(self, storage: Storage, recompute: Mapping[Op, Term]) -> Term:
        """At least 1 where the value is at hand: saved at the moment, or made by `recompute`."""
        if storage in self.in_use or storage not in self.saved:
            return 1
        assert storage.producer is not None
        return self.saved[storage] + recompute.get(storage.producer, 0)

    def bytes_at_moment(self) -> pulp.LpAffineExpression:
        """Of what the program decides on."""
        saved = pulp.lpSum(storage.num_bytes * saved for storage, saved in self.saved.items())
        states = pulp.lpSum(size * self.state[op] for op, size in self._program.kept.items())
        return saved + states + (self._waiting() if self._number else 0)

    def _waiting(self) -> pulp.LpAffineExpression:
        """Bytes of gradients, those in use aside, that are made before the moment and wanted after it; a reader is late if its maker is."""
        program, readers, terms = self._program.program, self._program.readers, list[Term]()
        for maker in (*self.late, *self._early):
            for storage in maker.writes:
                found = [reader for reader in readers.get(storage, ()) if reader in self.late]
                for reader in found if maker in self.late else ():
                    program += self.late[reader] >= self.late[maker]
                ends: list[Term] = [self.late[reader] for reader in found]
                if storage.is_kept_to_end or not self._sure.isdisjoint(readers.get(storage, ())):
                    ends = [1]
                if storage in self.in_use or not storage.num_bytes or not ends:
                    continue
                is_waiting = self._choose("waiting", storage.index)
                for end in ends:
                    program += is_waiting + self.late.get(maker, 0) >= end
                terms.append(storage.num_bytes * is_waiting)
        return pulp.lpSum(terms)


class _MomentProgram:
    """The program, written down."""

    def __init__(
        self,
        ops: Sequence[Op],
        costs: Costs,
        instants: Sequence[Instant],
        readers: Mapping[Storage, Sequence[Op]],
        *,
        is_relaxed: bool,
    ) -> None:
        self.program = pulp.LpProblem("moments", pulp.LpMinimize)
        self._is_relaxed = is_relaxed
        self._costs = costs
        self.ops = ops
        self.instants = instants
        self.readers = readers
        self.backward = instants[0].after
        self.repeatable = [
            op for op in ops if op.phase is Phase.LATE or op.recompute_target is not None
        ]
        self.kept = {
            op: state_bytes(op)
            for op in self.repeatable
            if op.phase is Phase.FORWARD and state_bytes(op)
        }
        self._stretches = [_Stretch(self, number) for number in range(len(instants))]
        self._write()

    def choose(self, name: str) -> pulp.LpVariable:
        """A further variable, 0 or 1; without whole numbers it may lie between."""
        return self.program.add_variable(
            name, 0, 1, cat=pulp.LpContinuous if self._is_relaxed else pulp.LpBinary
        )

    @cached_property
    def _most_ms(self) -> float:
        return len(self._stretches) * sum(self._again_ms.values())

    @cached_property
    def _again_ms(self) -> dict[Op, float]:
        return {
            op: self._costs.recompute[op.index].time_ms
            for op in self.repeatable
            if op.phase is Phase.FORWARD
        }

    @property
    def _scale(self) -> float:
        return _TIME_TOTAL / max(self._most_ms, 1e-9)

    def solve(self, time_limit_s: float) -> tuple[float, bool]:
        """As `min_recompute_ms`."""
        outcome = run(self.program, time_limit_s, "highs" if has_highs() else "cbc")
        if outcome.status is Status.INFEASIBLE:
            return inf, True
        return max(
            0.0, outcome.bound / self._scale - _HAIR * self._most_ms
        ), outcome.status is Status.OPTIMAL

    def _write(self) -> None:
        objective = [
            stretch.recompute[op] * (ms * self._scale)
            for stretch in self._stretches
            for op, ms in self._again_ms.items()
        ]
        self.program.setObjective(pulp.lpSum(objective))
        for stretch, instant in zip(self._stretches, self.instants, strict=True):
            _bound_bytes(self.program, stretch.bytes_at_moment(), instant.room_bytes)
        for stretch, following in pairwise(self._stretches):
            for op, is_late in following.late.items():
                self._add(stretch.is_late(op), is_late)
        for begin, end in combinations(range(len(self._stretches) + 1), 2):
            self._want(begin, end)

    def _is_after(self, number: int, op: Op) -> Term:
        """1 where a backward op runs after a moment; all do after the first, and none after the end."""
        return (
            self._stretches[number].is_late(op)
            if 0 < number < len(self._stretches)
            else int(number == 0)
        )

    def _want(self, begin: int, end: int) -> None:
        """What is read from one moment to another, or to the end, is saved at the first or made again in between."""
        stretch, recompute = self._stretches[begin], self._again_in(begin, end)
        for op in self.kept if stretch.state is not stretch.recompute else ():
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
            self._add(stretch.has(storage, recompute), runs)
        if end < len(self._stretches):
            for storage, saved in self._stretches[end].saved.items():
                self._add(stretch.has(storage, recompute), saved)

    def _add(self, at_hand: Term, wanted: Term) -> None:
        """A row `at_hand` >= `wanted`, unless that holds in any case."""
        if not isinstance(at_hand, int) and not (isinstance(wanted, int) and wanted <= 0):
            self.program += at_hand >= wanted

    def _again_in(self, begin: int, end: int) -> dict[Op, pulp.LpVariable]:
        """Whether each op runs again from one moment to another, or to the end."""
        if end == begin + 1:
            return self._stretches[begin].recompute
        found = {op: self.choose(f"again_{begin}_{end}_{op.index}") for op in self.repeatable}
        for op, runs in found.items():
            recompute = [stretch.recompute[op] for stretch in self._stretches[begin:end]]
            for one in recompute:
                self.program += runs >= one
            self.program += runs <= pulp.lpSum(recompute)
        return found


def _bound_bytes(program: pulp.LpProblem, total: pulp.LpAffineExpression, room_bytes: int) -> None:
    """The row in shares of the room, a hair loose: no schedule that fits is cut off by rounding."""
    scale = 1 / max(room_bytes, 1)
    program += total * scale <= max(room_bytes, 0) * scale + _HAIR
