"""Program points: the runs of backward ops, and the memory that every schedule needs there.

Each backward op runs exactly once in every schedule. While it runs, some storages are live whatever
the schedule does: its inputs and its result, all outputs and tangents, and each gradient that an op
before it makes and an op after it reads. "Before" and "after" mean by dependency, so they hold in
every schedule, too.

The profile of all points is computed from two Boolean matrices over the backward ops, so it takes
memory quadratic in their number: about 100 MB at 7,000 ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rockmate._util import Bools, Ints
from rockmate.costs.cost import Costs
from rockmate.graph.in_place import reusable_operand
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.schedule.schedule import baseline_schedule

# Largest number of points in `ProgramPoints.rising`.
_MAX_POINTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPoint:
    """The run of one backward op, or the first run of a forward op (`forward_point`).

    Attributes:
        op: the op.
        before: ops of the same pass that it depends on, so that they run before it in every
            schedule.
        after: backward ops that depend on it, so that they run after it in every schedule.
        live: storages that are live while it runs, in every schedule.
        min_bytes: their bytes and the op's workspace, less the result if it can be in place; with
            several forwards in flight also the outputs of the others.
    """

    op: Op
    before: tuple[Op, ...]
    after: tuple[Op, ...]
    live: frozenset[Storage]
    min_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """All program points, in the order of the baseline schedule.

    Attributes:
        ops: the backward ops.
        min_bytes: `ProgramPoint.min_bytes` of each.
        num_after: number of ops after each.
    """

    ops: list[Op]
    min_bytes: list[int]
    num_after: list[int]


class ProgramPoints:
    """The program points of one graph.

    Attributes:
        graph: ops and storages.
        costs: costs of the ops.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph = graph
        self.costs = costs

    def at(self, op: Op) -> ProgramPoint:
        """The point at which a backward op runs."""
        readers = self.graph.readers
        before, after = _ancestors(op), _descendants(self.graph, op)
        live = {s for s in self.graph.storages if s.is_output or s.is_tangent}
        live.update(storage for storage in (*op.reads, *op.writes) if not storage.is_static)
        for earlier in before:
            live.update(
                storage
                for storage in earlier.writes
                if storage.is_kept_to_end or not after.isdisjoint(readers.get(storage, ()))
            )
        own = {*op.reads, *op.writes}
        others_bytes = sum(storage.num_bytes for storage in live if storage not in own)
        return ProgramPoint(
            op=op,
            before=_in_order(before),
            after=_in_order(after),
            live=frozenset(live),
            min_bytes=self.own_bytes(op) + others_bytes + self._in_flight_bytes,
        )

    def border(self) -> ProgramPoint | None:
        """The first run of the backward, whichever op it is; None without a backward.

        All that the forward saves is live then, and so are the tangents.
        """
        runs = [self.graph.ops[index] for index in baseline_schedule(self.graph).backward]
        if not runs:
            return None
        live = {s for s in self.graph.storages if s.is_output or s.is_tangent}
        return ProgramPoint(
            op=runs[0],
            before=(),
            after=_in_order(runs),
            live=frozenset(live),
            min_bytes=sum(storage.num_bytes for storage in live) + self._in_flight_bytes,
        )

    @cached_property
    def _in_flight_bytes(self) -> int:
        """The bytes of the outputs of the other forwards in flight."""
        outputs = (storage.num_bytes for storage in self.graph.storages if storage.is_output)
        return (self.graph.num_in_flight - 1) * sum(outputs)

    @cached_property
    def rising(self) -> tuple[ProgramPoint, ...]:
        """Points that need more bytes than all before them, and the one that needs most.

        A later point leaves less to recompute, so it says more only if it needs more bytes. A point
        with nothing after it only tells whether any schedule fits.
        """
        profile = self._profile
        rising: list[Op] = []
        most_bytes = -1
        for op, min_bytes, num_after in self._rows():
            if num_after and min_bytes > most_bytes:
                rising.append(op)
                most_bytes = min_bytes
        step = max(1, -(-len(rising) // _MAX_POINTS))
        chosen = rising[::-1][::step][::-1]
        if profile.ops and max(profile.min_bytes) > most_bytes:
            chosen.append(profile.ops[int(np.argmax(profile.min_bytes))])
        return tuple(map(self.at, chosen))

    def _rows(self) -> Iterable[tuple[Op, int, int]]:
        profile = self._profile
        return zip(profile.ops, profile.min_bytes, profile.num_after, strict=True)

    def own_bytes(self, op: Op) -> int:
        """Bytes of an op's inputs, result and workspace, less the result if it can be in place."""
        own = {storage for storage in (*op.reads, *op.writes) if not storage.is_static}
        can_be_in_place = reusable_operand(self.graph, op, list(op.reads)) is not None
        taken_bytes = op.writes[0].num_bytes if can_be_in_place else 0
        overhead_bytes = self.costs.first[op.index].overhead_bytes
        return sum(storage.num_bytes for storage in own) + overhead_bytes - taken_bytes

    @cached_property
    def _profile(self) -> _Profile:
        # An op that is no part of the step does not run in the baseline, so it has no point.
        runs = baseline_schedule(self.graph).backward
        ops = [op for op in map(self.graph.ops.__getitem__, runs) if op.phase is Phase.BACKWARD]
        position = {op: index for index, op in enumerate(ops)}
        readers = {
            storage: [position[r] for r in self.graph.readers.get(storage, ()) if r in position]
            for op in ops
            for storage in op.writes
        }
        follows = _follows(ops, readers)
        waiting_bytes = _waiting_bytes(position, readers, follows)
        held = [s for s in self.graph.storages if s.is_output or s.is_tangent]
        min_bytes = []
        for index, op in enumerate(ops):
            own = {*op.reads, *op.writes}
            held_bytes = sum(storage.num_bytes for storage in held if storage not in own)
            held_bytes += self._in_flight_bytes
            min_bytes.append(self.own_bytes(op) + held_bytes + int(waiting_bytes[index]))
        num_after = (follows.sum(axis=1) - 1).tolist()
        return _Profile(ops=ops, min_bytes=min_bytes, num_after=num_after)


def _follows(ops: Sequence[Op], readers: Mapping[Storage, Sequence[int]]) -> Bools:
    """A matrix whose entry [a, b] says that op b is op a or depends on it."""
    follows = np.eye(len(ops), dtype=bool)
    for position in range(len(ops) - 1, -1, -1):
        for storage in ops[position].writes:
            for reader in readers[storage]:
                follows[position] |= follows[reader]
    return follows


def _waiting_bytes(
    position: Mapping[Op, int], readers: Mapping[Storage, Sequence[int]], follows: Bools
) -> Ints:
    """For each point the bytes of gradients that are made before it and read after it."""
    precedes = np.ascontiguousarray(follows.T)
    waiting_bytes = np.zeros(len(position), dtype=np.int64)
    for storage, positions in readers.items():
        assert storage.producer is not None
        maker = position[storage.producer]
        is_waiting = follows[maker].copy()
        is_read_later: Bools | bool = False
        if positions:
            is_read_later = np.logical_or.reduce([precedes[reader] for reader in positions], axis=0)
        is_waiting &= storage.is_kept_to_end | np.asarray(is_read_later)
        # There it counts among the op's own inputs and results.
        is_waiting[[maker, *positions]] = False
        waiting_bytes[is_waiting] += storage.num_bytes
    return waiting_bytes


def _ancestors(op: Op) -> set[Op]:
    """Backward ops that `op` depends on through gradients."""
    found: set[Op] = set()
    pending = [op]
    while pending:
        for storage in pending.pop().reads:
            producer = storage.producer
            if producer is not None and producer.phase is Phase.BACKWARD and producer not in found:
                found.add(producer)
                pending.append(producer)
    return found


def _descendants(graph: Graph, op: Op) -> set[Op]:
    """Ops that depend on `op`, all of them backward ops."""
    found: set[Op] = set()
    pending = [op]
    while pending:
        for storage in pending.pop().writes:
            readers = [reader for reader in graph.readers.get(storage, ()) if reader not in found]
            found.update(readers)
            pending += readers
    return found


def _in_order(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(sorted(ops, key=lambda op: op.index))
