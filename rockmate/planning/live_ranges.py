"""Where each value of a schedule is live, and how that changes when a run is dropped or inserted.

Positions are those of the schedule that one begins with. A run that is inserted stands right before a position and shares its
number, so nothing is renumbered until `schedule` writes the result down. Occupancy is kept as an upper estimate: what a change
frees beyond its own value is left out where finding it is not worth the time. The simulator has the last word.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rockmate._arrays import Floats, Ints
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, state_bytes
from rockmate.schedule.liveness import (
    DEFINED,
    KIND_BITS,
    KIND_MASK,
    READ,
    DefUse,
    op_def_use,
    split_keys,
)
from rockmate.schedule.schedule import Schedule, finish
from rockmate.schedule.simulate import Simulation

Insertion = tuple[
    int, int, int
]  # first and last position at which more bytes are in use, and how many

_MADE_BEFORE = 0  # kind of an event: made by a run that is inserted before the position; the other kinds are those of accesses
_MAX_RUNS = 60  # made again together for one evicted value


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillCandidates:
    """Stays of values in memory from one event to the next read, without one between.

    Attributes:
        storage: index of each value.
        last: position of the event.
        following: position of the read.
        order: in which the values were made; of equal prices the first goes first.
    """

    storage: Ints
    last: Ints
    following: Ints
    order: Ints


@dataclass(eq=False)
class Recomputation:
    """What has to run to have a value again.

    Attributes:
        storage: index of the value.
        runs: the ops, in order.
        costs: of all ops.
    """

    storage: int
    runs: tuple[Op, ...]
    costs: Costs

    @cached_property
    def time_ms(self) -> float:
        """Of all runs together."""
        return sum(self.costs.recompute[op.index].time_ms for op in self.runs)

    @cached_property
    def peak_bytes(self) -> int:
        """Of the runs one after the other, what only they read released on the way."""
        runs = set(self.runs)
        last_reader = {read: op for op in self.runs for read in op.reads}
        live = peak = 0
        for op in self.runs:
            live += op.written_bytes
            peak = max(peak, live + self.costs.recompute[op.index].overhead_bytes)
            for made in {*op.reads, *op.writes}:
                if (
                    made.index != self.storage
                    and made.producer in runs
                    and last_reader.get(made, op) is op
                ):
                    live -= made.num_bytes
        return peak


class LiveRanges:
    """The live ranges of a schedule and the bytes in use at each of its positions.

    A live range is one stay of a value in memory: from a run of its op to the last read before the next. They are kept as events,
    numbers as in `DefUse.keys` in ascending order, so that a value is live wherever its next event is a read. Results are left
    out, which stay.
    """

    def __init__(
        self, graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation
    ) -> None:
        """Reads the ranges off `schedule`; `simulation` is what the simulator says of it."""
        self.graph = graph
        self.costs = costs
        self._schedule = schedule
        self._steps = schedule.steps
        self._in_place = schedule.in_place
        self._dropped: set[int] = set()
        self._inserted: dict[int, set[int]] = {}
        self.bytes_in_use = np.array(simulation.live_bytes, dtype=np.int64)
        self._accesses = schedule.def_use or DefUse.of(
            op_def_use(graph), schedule.forward, schedule.backward
        )
        self._num_bits = self._accesses.num_bits
        counted = self._accesses.keys[~op_def_use(graph).is_result[self._accesses.storage]]
        self._events = array("q", counted.tobytes())
        self._events.append(
            len(graph.storages) << self._num_bits
        )  # behind every event stands another
        self._order_of: dict[int, int] = {}  # of the events that evictions add
        self._with_state: dict[
            Op, list[int]
        ] = {}  # positions at which ops run that need a state to run again
        for position in np.flatnonzero(
            op_def_use(graph).state_bytes[self._accesses.steps]
        ).tolist():
            self._with_state.setdefault(self.op_at(position), []).append(position)
        self._remakes: dict[int, dict[int, Recomputation | None]] = {}  # by position, then storage
        self._relying: dict[
            int, list[tuple[int, int]]
        ] = {}  # position and storage of those that need another storage to be live

    def is_recomputed(self) -> list[int]:
        """Positions of runs that repeat an earlier one."""
        return self._schedule.recomputed_positions()

    def is_dropped(self, position: int) -> bool:
        """Whether the run there has been dropped."""
        return position in self._dropped

    def op_at(self, position: int) -> Op:
        """The op that the schedule runs there."""
        return self.graph.ops[self._steps[position]]

    def again_ms(self, positions: Ints) -> Floats:
        """Times of running once more what runs there."""
        return self.costs.recompute_arrays.time_ms[self._accesses.steps[positions]]

    def bytes_before(self, position: int) -> int:
        """Bytes in use right before the run at `position`."""
        op = self.op_at(position)
        taken = op.writes[0].num_bytes if position in self._in_place else 0
        made = op.written_bytes + self.costs.first[op.index].overhead_bytes - taken
        return int(self.bytes_in_use[position]) - made

    # --- events --------------------------------------------------------------------------------------------------------------

    def _event(self, storage: int, position: int, kind: int) -> int:
        return storage << self._num_bits | position << KIND_BITS | kind

    def _position(self, event: int) -> int:
        return (event & (1 << self._num_bits) - 1) >> KIND_BITS

    def _place(self, event: int) -> int:
        """Where the event stands, or the next after it would."""
        return bisect_left(self._events, event)

    def _is_read(self, place: int, storage: int) -> bool:
        """Whether the event there is a read of the storage."""
        event = self._events[place]
        return bool(event & READ) and event >> self._num_bits == storage

    def _is_of(self, place: int, storage: int) -> bool:
        """Whether there is an event there, and it is the storage's."""
        return place >= 0 and self._events[place] >> self._num_bits == storage

    def gap_around(self, storage: int, position: int) -> tuple[int, int] | None:
        """The last event of a value before `position` and the next read after, None where it is read or made there, or not live."""
        place = self._place(self._event(storage, position, _MADE_BEFORE))
        following = self._position(self._events[place])
        if not self._is_read(place, storage) or following == position:
            return None
        return self._position(self._events[place - 1]), following

    def gaps_around(self, position: int) -> SpillCandidates:
        """Those around `position` of values that can be evicted."""
        ops = op_def_use(self.graph)
        events = np.frombuffer(self._events, dtype=np.int64)[:-1]
        storage, at = split_keys(events, self._num_bits)
        is_read = events & READ == READ
        place = np.flatnonzero(
            (at[:-1] < position) & (at[1:] > position) & is_read[1:] & ops.is_evictable[storage[1:]]
        )
        makers = np.flatnonzero(~is_read)
        made = makers[np.searchsorted(makers, place, side="right") - 1]
        order = at[made] * len(ops.num_bytes) + storage[made]
        for number in np.flatnonzero(events[made] & KIND_MASK == _MADE_BEFORE).tolist():
            order[number] = self._order_of[int(events[made[number]])]
        return SpillCandidates(
            storage=storage[place], last=at[place], following=at[place + 1], order=order
        )

    # --- making again --------------------------------------------------------------------------------------------------------

    def remake(self, storage: int, position: int) -> Recomputation | None:
        """What has to run before `position` to have a value there, None if that is impossible or too much."""
        known = self._remakes.setdefault(position, {})
        if storage not in known:
            known[storage] = self._new_remake(storage, position)
        return known[storage]

    def _new_remake(self, storage: int, position: int) -> Recomputation | None:
        inputs, events, num_bits = op_def_use(self.graph).inputs, self._events, self._num_bits
        producer = int(op_def_use(self.graph).producer[storage])
        runs, pending, live = {producer}, [producer], []
        while pending:
            read = inputs[pending.pop()]
            if read is None or len(runs) > _MAX_RUNS:
                return None
            for needed, maker in read:
                if maker in runs:
                    continue
                before = (
                    needed << num_bits | position << KIND_BITS
                )  # asked more often than anything else: no calls
                event = events[bisect_left(events, before)]
                if event == before or (event & READ and event >> num_bits == needed):
                    live.append(needed)
                else:
                    runs.add(maker)
                    pending.append(maker)
        for needed in live:
            self._relying.setdefault(needed, []).append((position, storage))
        return Recomputation(
            storage, tuple(self.graph.ops[index] for index in sorted(runs)), self.costs
        )

    def evict(self, remake: Recomputation, gap: tuple[int, int]) -> None:
        """Releases a value after the first position of the gap and has it made again before the second."""
        last, following = gap
        storage = remake.storage
        made = self._event(storage, following, _MADE_BEFORE)
        self._order_of[made] = len(self._steps) * len(self.graph.storages) + len(self._order_of)
        insort(self._events, made)
        self.bytes_in_use[last + 1 : following] -= self.graph.storages[storage].num_bytes
        self._forget_remakes(storage, gap)
        for op in remake.runs:
            self._inserted.setdefault(following, set()).add(op.index)
            self._keep_state(op, following)
            for needed, _ in op_def_use(self.graph).inputs[op.index] or ():
                self._add_read(needed, following)

    def _forget_remakes(self, storage: int, gap: tuple[int, int]) -> None:
        """Those that relied on a value which is not live in the gap, and those at its end, where some may be."""
        last, following = gap
        self._remakes.pop(following, None)
        for position, other in self._relying.get(storage, ()):
            if last < position < following:
                self._remakes.get(position, {}).pop(other, None)

    def _add_read(self, storage: int, position: int) -> None:
        """Notes that an inserted run reads a value, if it is in memory from before."""
        place = self._place(self._event(storage, position, _MADE_BEFORE))
        if self._is_read(place, storage) and self._position(self._events[place]) > position:
            self._events.insert(place, self._event(storage, position, READ))

    def _keep_state(self, op: Op, position: int) -> None:
        """Holds what an op needs to run again from its first run to the one that is inserted before `position`."""
        if op in self._with_state:
            runs = self._with_state[op]
            held_until = runs[-1] + 1 if len(runs) > 1 else runs[0]
            self.bytes_in_use[held_until : position + 1] += state_bytes(op)
            insort(runs, position)

    # --- dropping ------------------------------------------------------------------------------------------------------------

    def drop_candidates(self) -> tuple[Ints, Ints, Ints, Ints]:
        """What dropping each repeated run adds: for each value that it makes and that is read, positions of the run, first, last, bytes.

        As the schedule came, before any change; without operands that can no longer be taken over in place.
        """
        def_use = self._accesses
        is_result = op_def_use(self.graph).is_result[def_use.storage]
        made = np.flatnonzero(
            def_use.is_definition
            & ~def_use.is_last
            & ~def_use.is_first[def_use.position]
            & ~is_result
        )
        made = made[np.argsort(def_use.position[made], kind="stable")]
        position = def_use.position[made]
        return (
            position,
            def_use.position[made - 1] + 1,
            position - 1,
            op_def_use(self.graph).num_bytes[def_use.storage[made]],
        )

    def extra_for_drop(self, position: int) -> list[Insertion]:
        """What dropping the run at `position` adds: (first, last, bytes), since its results must stay from the run before."""
        extra: list[Insertion] = []
        for storage in self.op_at(position).writes:
            place = self._place(self._event(storage.index, position, DEFINED))
            if not self._is_of(place - 1, storage.index) or not self._is_read(
                place + 1, storage.index
            ):
                continue
            end = self._position(self._events[place - 1])
            extra.append((end + 1, position - 1, storage.num_bytes))
            if end in self._in_place:
                extra.append((end, end, self.op_at(end).writes[0].num_bytes))
        return extra

    def drop(self, position: int, extra: Sequence[Insertion]) -> None:
        """Drops the run at `position`, which adds `extra`, and every run that then serves nobody."""
        for first, last, num_bytes in extra:
            self.bytes_in_use[first : last + 1] += num_bytes
        self._forget(position)

    def _forget(self, position: int) -> None:
        """Takes out a run, so that who reads its results reads those of the run before, and what only it needed."""
        op = self.op_at(position)
        self._dropped.add(position)
        for storage in op.writes:
            self._take_out(self._event(storage.index, position, DEFINED))
        for storage in op.reads:
            place = self._take_out(self._event(storage.index, position, READ))
            if place is None or self._is_read(place, storage.index):
                continue
            end = self._position(self._events[place - 1])
            self.bytes_in_use[end + 1 : position + 1] -= storage.num_bytes
            is_unread = not self._is_read(place - 1, storage.index)
            if is_unread and self._is_of(place - 2, storage.index) and self._is_dead(end):
                self.bytes_in_use[end] -= storage.num_bytes
                self._forget(end)

    def _take_out(self, event: int) -> int | None:
        """Removes an event and returns where it stood; None if there is none."""
        place = self._place(event)
        if self._events[place] != event:
            return None
        del self._events[place]
        return place

    def _is_dead(self, position: int) -> bool:
        made = [
            (storage.index, self._event(storage.index, position, DEFINED))
            for storage in self.op_at(position).writes
        ]
        places = [(storage, self._place(event)) for storage, event in made]
        return not any(self._is_read(place + 1, storage) for storage, place in places)

    def schedule(self) -> Schedule:
        """The schedule with all changes made."""
        if not self._inserted and not self._dropped:
            return self._schedule
        forward, backward = (
            self._changed(0, len(self._schedule.forward)),
            self._changed(len(self._schedule.forward), len(self._steps)),
        )
        return finish(self.graph, forward, backward)

    def _changed(self, begin: int, end: int) -> list[int]:
        """The runs from one position to another, with all changes made."""
        steps: list[int] = []
        for position in sorted(
            position
            for position in self._inserted.keys() | self._dropped
            if begin <= position < end
        ):
            steps += self._steps[begin:position]
            steps += sorted(self._inserted.get(position, ()))
            begin = position + (position in self._dropped)
        steps += self._steps[begin:end]
        return steps
