"""Program points: the runs of backward ops, and the memory that every schedule needs there.

Each backward op runs exactly once in every schedule. While it runs, some storages are live whatever
the schedule does: its inputs and its result, all outputs and tangents, and each gradient that an op
before it makes and an op after it reads. "Before" and "after" mean by dependency, so they hold in
every schedule, too.

The profile of all points is computed from two Boolean matrices over the backward ops, so it takes
memory quadratic in their number: about 100 MB at 7,000 ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rockmate._util import Bools
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


class ProgramPoints:
    """The program points of one graph.

    Attributes:
        runs: the late and backward ops that run in every schedule.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph = graph
        self.costs = costs
        # An op that is no part of the step does not run in the baseline, so it has no point.
        self.runs = [graph.ops[index] for index in baseline_schedule(graph).backward]
        self._ops = [op for op in self.runs if op.phase is Phase.BACKWARD]
        self._position = {op: position for position, op in enumerate(self._ops)}
        self._held = frozenset(s for s in graph.storages if s.is_output or s.is_tangent)

    def at(self, op: Op) -> ProgramPoint:
        """The point at which a backward op runs."""
        position = self._position[op]
        after = [self._ops[other] for other in np.flatnonzero(self._follows[position])]
        before = [self._ops[other] for other in np.flatnonzero(self._follows[:, position])]
        before, after = before[:-1], after[1:]  # without itself
        live = self._held.union(each for each in (*op.reads, *op.writes) if not each.is_static)
        later = set(after)
        live = live.union(
            storage
            for earlier in before
            for storage in earlier.writes
            if storage.is_kept_to_end or not later.isdisjoint(self.graph.readers.get(storage, ()))
        )
        others_bytes = sum(storage.num_bytes for storage in live.difference(op.reads, op.writes))
        return ProgramPoint(
            op=op,
            before=tuple(before),
            after=tuple(after),
            live=live,
            min_bytes=self.own_bytes(op) + others_bytes + self._in_flight_bytes,
        )

    def border(self) -> ProgramPoint:
        """The first run of the backward, whichever op it is.

        All that the forward saves is live then, and so are the tangents.
        """
        return ProgramPoint(
            op=self.runs[0],
            before=(),
            after=tuple(self.runs),
            live=self._held,
            min_bytes=sum(each.num_bytes for each in self._held) + self._in_flight_bytes,
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
        rising: list[Op] = []
        most_bytes = -1
        sizes, num_after = self._min_bytes(), self._follows.sum(axis=1) - 1
        for op, min_bytes, number in zip(self._ops, sizes, num_after.tolist(), strict=True):
            if number and min_bytes > most_bytes:
                rising.append(op)
                most_bytes = min_bytes
        step = max(1, -(-len(rising) // _MAX_POINTS))
        chosen = rising[::-1][::step][::-1]
        if sizes and max(sizes) > most_bytes:
            chosen.append(self._ops[int(np.argmax(sizes))])
        return tuple(map(self.at, chosen))

    def own_bytes(self, op: Op) -> int:
        """Bytes of an op's inputs, result and workspace, less the result if it can be in place."""
        own = {storage for storage in (*op.reads, *op.writes) if not storage.is_static}
        can_be_in_place = reusable_operand(self.graph, op, list(op.reads)) is not None
        taken_bytes = op.writes[0].num_bytes if can_be_in_place else 0
        overhead_bytes = self.costs.first[op.index].overhead_bytes
        return sum(storage.num_bytes for storage in own) + overhead_bytes - taken_bytes

    @cached_property
    def _follows(self) -> Bools:
        """A matrix whose entry [a, b] says that op b is op a or depends on it."""
        follows = np.eye(len(self._ops), dtype=bool)
        for position in range(len(self._ops) - 1, -1, -1):
            for storage in self._ops[position].writes:
                for reader in self._readers(storage):
                    follows[position] |= follows[reader]
        return follows

    def _readers(self, storage: Storage) -> list[int]:
        readers = self.graph.readers.get(storage, ())
        return [self._position[reader] for reader in readers if reader in self._position]

    def _min_bytes(self) -> list[int]:
        """`ProgramPoint.min_bytes` of each backward op."""
        waiting_bytes = self._waiting_bytes()
        held_bytes = [
            sum(each.num_bytes for each in self._held.difference(op.reads, op.writes))
            for op in self._ops
        ]
        return [
            self.own_bytes(op) + held + self._in_flight_bytes + waiting
            for op, held, waiting in zip(self._ops, held_bytes, waiting_bytes, strict=True)
        ]

    def _waiting_bytes(self) -> list[int]:
        """For each point the bytes of gradients that are made before it and read after it."""
        precedes = np.ascontiguousarray(self._follows.T)
        waiting_bytes = np.zeros(len(self._ops), dtype=np.int64)
        for maker, op in enumerate(self._ops):
            for storage in op.writes:
                readers = self._readers(storage)
                is_waiting = self._follows[maker].copy()
                if not storage.is_kept_to_end:
                    is_waiting &= precedes[readers].any(axis=0)
                # There it counts among the op's own inputs and results.
                is_waiting[[maker, *readers]] = False
                waiting_bytes[is_waiting] += storage.num_bytes
        return waiting_bytes.tolist()
