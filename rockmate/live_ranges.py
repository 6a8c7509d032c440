"""Where each value of a schedule is live, and how that changes when a run is dropped or inserted.

Positions are those of the schedule that one begins with. A run that is inserted stands right before a position and shares its
number, so nothing is renumbered until `schedule` writes the result down. Occupancy is kept as an upper estimate: what a change
frees beyond its own value is left out where finding it is not worth the time. The simulator has the last word.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from rockmate.accesses import Accesses, Ints, state_bytes
from rockmate.costs import Costs
from rockmate.graph import Graph, Op, Phase, Storage
from rockmate.schedule import Schedule, finish
from rockmate.simulate import Simulation

Extra = tuple[int, int, int]  # first and last position at which more bytes are in use, and how many


@dataclass(eq=False, slots=True)
class LiveRange:
    """One stay of a value in memory: from a run of its op to the last read before the next run.

    Attributes:
        storage: the value.
        start: position of the run that makes it.
        reads: positions that read it, ascending.
        number: in the order in which ranges were made.
    """

    storage: Storage
    start: int
    reads: list[int]
    number: int

    @property
    def end(self) -> int:
        """Last position at which it is live."""
        return self.reads[-1] if self.reads else self.start


class LiveRanges:
    """The live ranges of a schedule and the bytes in use at each of its positions."""

    def __init__(self, graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation) -> None:
        """Reads the ranges off `schedule`; `simulation` is what the simulator says of it."""
        self.graph = graph
        self.costs = costs
        self._schedule = schedule
        self._steps = schedule.steps
        self._num_forward = len(schedule.forward)
        self._in_place = schedule.in_place
        self._dropped: set[int] = set()
        self.inserted: dict[int, set[int]] = {}
        self.bytes_in_use = np.array(simulation.live_bytes, dtype=np.int64)
        accesses = schedule.accesses or Accesses.of(graph, schedule.forward, schedule.backward)
        self._accesses = accesses
        self._with_state: dict[Op, list[int]] = {}  # positions at which ops run that need a state to run again
        for position in np.flatnonzero(graph.op_accesses.state_bytes[accesses.steps]).tolist():
            self._with_state.setdefault(self.op_at(position), []).append(position)
        is_counted = ~graph.op_accesses.is_result[accesses.storage]  # a result stays
        made = np.flatnonzero(accesses.is_made & is_counted)
        in_order = np.argsort(accesses.position[made], kind="stable")
        number = np.empty(len(made), dtype=np.int64)
        number[in_order] = np.arange(len(made))
        last = np.flatnonzero(accesses.is_last & is_counted)
        self._made_by = accesses.storage[made[in_order]]
        self._begin = np.searchsorted(accesses.storage[made], np.arange(len(graph.storages) + 1)).tolist()  # of each value's ranges
        self._bounds = list(zip(made.tolist(), last.tolist(), number.tolist(), strict=True))  # first access, last, number of each range
        self._positions = accesses.position.tolist()
        self._extents = np.column_stack([accesses.position[made], accesses.position[last]])
        self._extents[(self._extents[:, 0] == self._extents[:, 1]) | (graph.op_accesses.num_bytes[accesses.storage[made]] == 0)] = 0, -1
        self._extents = self._extents[in_order]
        self._ranges: list[LiveRange | None] = [None] * len(made)
        self._of: dict[Storage, list[LiveRange]] = {}

    def of(self, storage: Storage) -> list[LiveRange]:
        """The ranges of a value, in order; none of a result, which stays."""
        if storage not in self._of:
            self._of[storage] = [] if storage.is_result else self._read_off(storage)
        return self._of[storage]

    def _read_off(self, storage: Storage) -> list[LiveRange]:
        positions = self._positions
        own = self._bounds[self._begin[storage.index] : self._begin[storage.index + 1]]
        ranges = [LiveRange(storage, positions[made], positions[made + 1 : last + 1], number) for made, last, number in own]
        for live in ranges:
            self._ranges[live.number] = live
        return ranges

    def _numbered(self, number: int) -> LiveRange:
        if self._ranges[number] is None:
            self.of(self.graph.storages[self._made_by[number]])
        live = self._ranges[number]
        assert live is not None
        return live

    def runs_again(self) -> list[int]:
        """Positions of runs that repeat an earlier one."""
        return self._schedule.repeated()

    def is_dropped(self, position: int) -> bool:
        """Whether the run there has been dropped."""
        return position in self._dropped

    def op_at(self, position: int) -> Op:
        """The op that the schedule runs there."""
        return self.graph.ops[self._steps[position]]

    def cost_ms(self, op: Op) -> float:
        """Time of running `op` once more."""
        return self.costs.again[op.index].time_ms

    def not_live(self, op: Op, position: int) -> list[Storage]:
        """What `op` reads that is not in memory when a run inserted before `position` would read it."""
        return [storage for storage in op.reads if not storage.is_static and not self._is_live(storage, position)]

    def _is_live(self, storage: Storage, position: int) -> bool:
        ranges = self._of.get(storage) or self.of(storage)
        if not ranges:
            return storage.is_result or storage.is_tangent
        for live in ranges:  # asked more often than anything else: no generator, no property
            if live.start < position:
                if live.reads and position <= live.reads[-1]:
                    return True
            elif live.start == position:
                if self._is_inserted(live, position):
                    return True
            else:
                return False
        return False

    def over(self, position: int) -> list[LiveRange]:
        """Ranges that start before `position` and end after it, of values that take memory."""
        extents = self._extents
        numbers = np.flatnonzero((extents[:, 0] < position) & (extents[:, 1] > position))
        return [self._numbered(number) for number in numbers.tolist()]

    def gap_around(self, live: LiveRange, position: int) -> tuple[int, int] | None:
        """The last event of the range before `position` and the next read after, None where it is read or made there."""
        place = bisect_left(live.reads, position)
        if place == len(live.reads) or live.reads[place] == position or live.start >= position:
            return None
        return (live.reads[place - 1] if place else live.start), live.reads[place]

    def bytes_before(self, position: int) -> int:
        """Bytes in use right before the run at `position`."""
        op = self.op_at(position)
        taken = op.writes[0].num_bytes if position in self._in_place else 0
        made = op.written_bytes + self.costs.first[op.index].overhead_bytes - taken
        return int(self.bytes_in_use[position]) - made

    def _new(self, storage: Storage, start: int, reads: list[int]) -> LiveRange:
        live = LiveRange(storage, start, reads, len(self._ranges))
        self._ranges.append(live)
        return live

    def _note_reads(self, *changed: LiveRange) -> None:
        for live in changed:
            self._extents[live.number] = _extent(live)

    # --- changes -------------------------------------------------------------------------------------------------------------

    def stays_for_drops(self) -> tuple[Ints, Ints, Ints, Ints]:
        """What dropping each repeated run adds: for each value that it makes and that is read, positions of the run, first, last, bytes.

        As the schedule came, before any change; without operands that can no longer be taken over in place.
        """
        accesses = self._accesses
        is_result = self.graph.op_accesses.is_result[accesses.storage]
        made = np.flatnonzero(accesses.is_made & ~accesses.is_last & ~accesses.is_first[accesses.position] & ~is_result)
        made = made[np.argsort(accesses.position[made], kind="stable")]
        position = accesses.position[made]
        return position, accesses.position[made - 1] + 1, position - 1, self.graph.op_accesses.num_bytes[accesses.storage[made]]

    def extra_for_drop(self, position: int) -> list[Extra]:
        """What dropping the run at `position` adds: (first, last, bytes), since its results must stay from the run before."""
        extra: list[Extra] = []
        for storage in self.op_at(position).writes:
            ranges = self.of(storage)
            place = next((i for i, live in enumerate(ranges) if live.start == position), None)
            if not place or not ranges[place].reads:
                continue
            before = ranges[place - 1]
            extra.append((before.end + 1, position - 1, storage.num_bytes))
            if before.end in self._in_place:
                extra.append((before.end, before.end, self.op_at(before.end).writes[0].num_bytes))
        return extra

    def drop(self, position: int, extra: Sequence[Extra]) -> None:
        """Drops the run at `position`, which adds `extra`, and every run that then serves nobody."""
        for first, last, num_bytes in extra:
            self.bytes_in_use[first : last + 1] += num_bytes
        op = self.op_at(position)
        for storage in op.writes:
            ranges = self.of(storage)
            place = next((i for i, live in enumerate(ranges) if live.start == position), None)
            if place:
                ranges[place - 1].reads += ranges[place].reads
                ranges[place].reads = []
                self._note_reads(ranges[place - 1], ranges[place])
        self._forget(position)

    def _forget(self, position: int) -> None:
        """Takes out a run whose results nobody reads from here, and what only it needed."""
        op = self.op_at(position)
        self._dropped.add(position)
        for storage in op.writes:
            self._of[storage] = [live for live in self.of(storage) if live.start != position]
        for storage in op.reads:
            live = next((live for live in self.of(storage) if position in live.reads), None)
            if live is None:
                continue
            live.reads.remove(position)
            self._note_reads(live)
            if live.end < position:
                self.bytes_in_use[live.end + 1 : position + 1] -= storage.num_bytes
            ranges = self.of(storage)
            if not live.reads and ranges.index(live) > 0 and self._serves_nobody(live.start):
                self.bytes_in_use[live.start] -= storage.num_bytes
                self._forget(live.start)

    def _serves_nobody(self, position: int) -> bool:
        writes = self.op_at(position).writes
        return not any(live.start == position and live.reads for storage in writes for live in self.of(storage))

    def evict(self, live: LiveRange, gap: tuple[int, int], runs: Sequence[Op]) -> None:
        """Ends `live` at the first position of the gap and has `runs` make it again before the second."""
        last, following = gap
        place = bisect_right(live.reads, last)
        ranges = self.of(live.storage)
        ranges.insert(ranges.index(live) + 1, self._new(live.storage, following, live.reads[place:]))
        self._extents = np.concatenate([self._extents, [_extent(self._numbered(-1))]])
        del live.reads[place:]
        self._note_reads(live)
        self.bytes_in_use[last + 1 : following] -= live.storage.num_bytes
        for op in runs:
            self.inserted.setdefault(following, set()).add(op.index)
            self._keep_state(op, following)
            for storage in op.reads:
                for known in self.of(storage):
                    if known.start < following <= known.end and following not in known.reads:
                        insort(known.reads, following)

    def _keep_state(self, op: Op, position: int) -> None:
        """Holds what an op needs to run again from its first run to the one that is inserted before `position`."""
        if op in self._with_state:
            runs = self._with_state[op]
            held_until = runs[-1] + 1 if len(runs) > 1 else runs[0]
            self.bytes_in_use[held_until : position + 1] += state_bytes(op)
            insort(runs, position)

    def _is_inserted(self, live: LiveRange, position: int) -> bool:
        producer = live.storage.producer
        return live.start == position and producer is not None and producer.index in self.inserted.get(position, ())

    def schedule(self) -> Schedule:
        """The schedule with all changes made."""
        if not self.inserted and not self._dropped:
            return self._schedule
        forward, backward = self._changed(0, self._num_forward), self._changed(self._num_forward, len(self._steps))
        return finish(self.graph, forward, backward)

    def _changed(self, begin: int, end: int) -> list[int]:
        """The runs from one position to another, with all changes made."""
        steps: list[int] = []
        for position in sorted(position for position in self.inserted.keys() | self._dropped if begin <= position < end):
            steps += self._steps[begin:position]
            steps += sorted(self.inserted.get(position, ()))
            begin = position + (position in self._dropped)
        steps += self._steps[begin:end]
        return steps


def _extent(live: LiveRange) -> tuple[int, int]:
    """Start and last read; nothing where it is never read or takes no memory."""
    return (live.start, live.reads[-1]) if live.reads and live.storage.num_bytes else (0, -1)


def can_run_again(op: Op | None) -> TypeGuard[Op]:
    """Whether the op may run a second time."""
    return op is not None and op.phase is not Phase.BACKWARD and op.recompute_target is not None
