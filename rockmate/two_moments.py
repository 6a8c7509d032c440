"""The least time to run again where two moments of the backward bind: a 0/1 program over what is in memory at both.

Each moment by itself is the knapsack of `rockmate/certificate.py`. Where a budget is near the smallest peak, what has to go at one
moment is wanted before the next, and has to go again there: both are paid for. With b1 before b2 in every schedule:

| variable | meaning |
|---|---|
| saved_1[v], saved_2[v] | value v is in memory while b1 (b2) runs, to be read after it |
| again_1[o], again_2[o] | op o runs again between b1 and b2, after b2 |
| state[o] | what o keeps of its first run is in memory while b1 runs |
| late[x] | backward op x, which no path puts before or behind b2, runs after it |
| waiting[g] | gradient g is in memory while b2 runs, if that depends on where its maker or its readers stand |
| at_all[o] | op o runs again after b1 |

The last follows from the others; its rows are what keeps the program without whole numbers from being below the first moment's own.

docs/algorithms.md has the rows and the proof that no schedule takes less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import pulp

from checkmate import Status
from checkmate.backend import has_highs, run
from rockmate.accesses import state_bytes
from rockmate.costs import Costs
from rockmate.graph import Op, Phase, Storage

_HAIR = 1e-6  # of a limit or of all time: above a solver's own tolerance
_TIME_TOTAL = 1e4  # of all runs together in the program: solvers end where they are within 1e-6 of the optimum

Term = pulp.LpVariable | pulp.LpAffineExpression | int


@dataclass(frozen=True, slots=True)
class _Choices:
    """The program's 0/1 variables; relaxed ones may lie between."""

    program: pulp.LpProblem
    is_relaxed: bool

    def make(self, name: str) -> pulp.LpVariable:
        """One more."""
        return self.program.add_variable(name, 0, 1, cat=pulp.LpContinuous if self.is_relaxed else pulp.LpBinary)


class _Stretch:
    """The part of a step behind one moment: what is saved at the moment, what runs again behind it."""

    def __init__(self, choices: _Choices, name: str, ops: Sequence[Op], in_use: Collection[Storage]) -> None:
        self._in_use = in_use
        self.saved = {s: choices.make(f"saved_{name}_{s.index}") for op in ops for s in op.writes if s not in in_use}
        repeatable = [op for op in ops if op.phase is Phase.LATE or op.recompute_target is not None]
        self.again = {op: choices.make(f"again_{name}_{op.index}") for op in repeatable}

    def has(self, storage: Storage) -> Term:
        """At least 1 where the value can be read in the stretch."""
        if storage in self._in_use:
            return 1
        assert storage.producer is not None
        return self.saved[storage] + self.again.get(storage.producer, 0)

    def saved_bytes(self) -> pulp.LpAffineExpression:
        return pulp.lpSum(storage.num_bytes * saved for storage, saved in self.saved.items())


def least_again_ms(
    ops: Sequence[Op],
    costs: Costs,
    *,
    in_use: tuple[Collection[Storage], Collection[Storage]],
    room_bytes: tuple[int, int],
    ahead: Collection[Op],
    between: Sequence[Op],
    behind: Sequence[Op],
    either: Sequence[Op],
    readers: Mapping[Storage, Sequence[Op]],
    is_relaxed: bool,
    time_limit_s: float,
) -> tuple[float, bool]:
    """Time of further runs that no schedule does without, in milliseconds; and whether it is the program's optimum.

    Args:
        ops: forward and late ops in order.
        costs: of each op.
        in_use: what is in memory while the first and the second moment's op runs in every schedule.
        room_bytes: what the budget leaves beside that.
        ahead: backward ops that run before the second moment in every schedule.
        between: those that run between the two in every schedule, the second moment's own among them.
        behind: those that run after both.
        either: those that run after the first, before or after the second.
        readers: of each storage.
        is_relaxed: without whole numbers, which takes a small part of the time and gives a little less.
        time_limit_s: after which the bound that the solver has proved so far counts, 0 if there is none.

    Returns:
        The time, infinite if no schedule fits, and True if the program was solved to the end.
    """
    program = pulp.LpProblem("two_moments", pulp.LpMinimize)
    choices = _Choices(program, is_relaxed)
    first, second = (_Stretch(choices, name, ops, storages) for name, storages in zip("12", in_use, strict=True))
    values = {storage for op in ops for storage in op.writes}
    kept = {op: state_bytes(op) for op in ops if op.phase is Phase.FORWARD and op in first.again and state_bytes(op)}
    state = {op: choices.make(f"state_{op.index}") for op in kept}
    late = {op: choices.make(f"late_{op.index}") for op in either}
    waiting = _waiting(choices, late, ahead, behind, in_use[1], readers)
    price = {op: costs.again[op.index].time_ms for op in first.again if op.phase is Phase.FORWARD}
    scale = _TIME_TOTAL / max(2 * sum(price.values()), 1e-9)
    program.setObjective(pulp.lpSum(stretch.again[op] * (ms * scale) for stretch in (first, second) for op, ms in price.items()))
    _bound_bytes(program, first.saved_bytes() + _bytes_of(kept, state), room_bytes[0])
    _bound_bytes(program, second.saved_bytes() + _bytes_of(kept, second.again) + waiting, room_bytes[1])
    for op in kept:
        program += state[op] >= first.again[op]
        program += state[op] >= second.again[op]
    for storage, saved in second.saved.items():
        program += saved <= first.has(storage)
    for stretch in (first, second):
        for op, again in stretch.again.items():
            _want(program, stretch, op, values, again)
    for op in between:
        _want(program, first, op, values, 1)
    for op in behind:
        _want(program, second, op, values, 1)
    for op, is_late in late.items():
        _want(program, first, op, values, 1 - is_late)
        _want(program, second, op, values, is_late)
    _bound_runs_at_all(choices, first, second, values, [*between, *behind, *either])
    outcome = run(program, time_limit_s, "highs" if has_highs() else "cbc")
    if outcome.status is Status.INFEASIBLE:
        return inf, True
    return max(0.0, outcome.bound / scale - _HAIR * 2 * sum(price.values())), outcome.status is Status.OPTIMAL


def _waiting(
    choices: _Choices,
    late: Mapping[Op, pulp.LpVariable],
    ahead: Collection[Op],
    behind: Collection[Op],
    in_use: Collection[Storage],
    readers: Mapping[Storage, Sequence[Op]],
) -> pulp.LpAffineExpression:
    """Bytes of gradients, `in_use` aside, that are made before the second moment and wanted after it; a reader is late if its maker is."""
    program, terms = choices.program, list[Term]()
    last = set(behind)
    for maker in (*late, *ahead):
        is_late = late.get(maker, 0)
        for storage in maker.writes:
            found = [reader for reader in readers.get(storage, ()) if reader in late]
            for reader in found if maker in late else ():
                program += late[reader] >= is_late
            ends: list[Term] = [late[reader] for reader in found]
            if storage.is_kept_to_end or not last.isdisjoint(readers.get(storage, ())):
                ends = [1]
            if storage in in_use or not storage.num_bytes or not ends:
                continue
            is_waiting = choices.make(f"waiting_{storage.index}")
            for end in ends:
                program += is_waiting + is_late >= end
            terms.append(storage.num_bytes * is_waiting)
    return pulp.lpSum(terms)


def _bound_runs_at_all(
    choices: _Choices, first: _Stretch, second: _Stretch, values: Collection[Storage], backward: Iterable[Op]
) -> None:
    """The rows of the first moment alone, for runs anywhere behind it."""
    program = choices.program
    at_all = {op: choices.make(f"at_all_{op.index}") for op in first.again}
    for op, runs in at_all.items():
        program += runs >= first.again[op]
        program += runs >= second.again[op]
        program += runs <= first.again[op] + second.again[op]
    wanted: dict[tuple[Storage, Op | None], Term] = {(s, None): 1 for op in backward for s in op.reads}
    wanted.update({(s, op): runs for op, runs in at_all.items() for s in op.reads})
    for (storage, _), runs in wanted.items():
        if storage in values and storage in first.saved:
            assert storage.producer is not None
            program += first.saved[storage] + at_all.get(storage.producer, 0) >= runs


def _want(program: pulp.LpProblem, stretch: _Stretch, reader: Op, values: Collection[Storage], wanted: Term) -> None:
    """What `reader` reads can be read in the stretch where `wanted` is 1."""
    for storage in dict.fromkeys(reader.reads):
        has = stretch.has(storage) if storage in values else 1
        if not isinstance(has, int):
            program += has >= wanted


def _bytes_of(num_bytes: Mapping[Op, int], chosen: Mapping[Op, pulp.LpVariable]) -> pulp.LpAffineExpression:
    return pulp.lpSum(size * chosen[op] for op, size in num_bytes.items())


def _bound_bytes(program: pulp.LpProblem, total: pulp.LpAffineExpression, room_bytes: int) -> None:
    """The row in shares of the room, a hair loose: no schedule that fits is cut off by rounding."""
    scale = 1 / max(room_bytes, 1)
    program += total * scale <= max(room_bytes, 0) * scale + _HAIR
