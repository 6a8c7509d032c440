"""The live intervals of a schedule, kept up to date as runs are removed and inserted.

The incremental form of `rockmate.schedule.liveness`: a change takes time in proportion to what it
touches, where `DefUse` reads a whole schedule. Positions are those of the schedule that
`LiveRanges` begins with. A run that is inserted before a position shares its number, so positions
keep their meaning until `schedule` writes the result.

After removals, live intervals are exact and live bytes are an upper bound. After evictions, both
are estimates: an interval may be too long, since some memory that an eviction frees beside its own
value would take long to find. The simulator gives the exact peak.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rockmate._util import Floats, Ints
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op
from rockmate.planning.recomputation import Recomputation, recompute_tables
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

# Bytes that become live at more positions: first position, last position, number of bytes.
Extension = tuple[int, int, int]

# Event kind: definition by an op inserted before the position. For other kinds, see `liveness`.
_DEFINED_BEFORE = 0
# Limit on the ops that are recomputed for one evicted value. With 60, smallest peaks are up to 4 %
# larger (HRNet, Qwen3-MoE, GPT-2 of 96 layers); without it, the last takes twice as long to find.
_MAX_RECOMPUTED_OPS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillCandidates:
    """Gaps of live values: from one event to the next read, with no event between.

    Attributes:
        storage: index of each value.
        last: position of the event.
        following: position of the read.
        order: rank of the value's definition. At equal prices, the smallest rank is evicted first.
    """

    storage: Ints
    last: Ints
    following: Ints
    order: Ints


class LiveRanges:
    """The live intervals of a schedule and the live bytes at each of its positions.

    A live interval lasts from a run of a value's op to the last read before the op's next run.
    Intervals are stored as events: numbers as in `DefUse.keys`, in ascending order. So a value is
    live wherever its next event is a read. Results are left out, since they are never released.

    Attributes:
        live_bytes: at each position, while its run is running.
    """

    def __init__(
        self, graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation
    ) -> None:
        self.graph, self.costs = graph, costs
        self.live_bytes = np.array(simulation.live_bytes, dtype=np.int64)
        self._schedule, self._steps = schedule, schedule.steps
        # How often the bytes of a value count in every position if it is live at the border.
        self.border_weight = graph.num_in_flight - 1
        self._dropped: set[int] = set()
        # Indices of the ops inserted before each position.
        self._inserted: dict[int, set[int]] = {}
        self._def_use = schedule.def_use or DefUse.of(op_def_use(graph), *schedule.order)
        self._num_bits = self._def_use.num_bits
        ops = self._def_use.ops
        counted = self._def_use.keys[~ops.is_result[self._def_use.storage]]
        self._events = array("q", counted.tobytes())
        # A sentinel: each event has a successor.
        self._events.append(len(graph.storages) << self._num_bits)
        # Rank of the definitions that evictions add.
        self._order_of: dict[int, int] = {}
        # Positions of ops that keep a state for their recomputation.
        self._state_positions: dict[Op, list[int]] = {}
        for position in np.flatnonzero(ops.state_bytes[self._def_use.steps]).tolist():
            self._state_positions.setdefault(self.op_at(position), []).append(position)
        # Known recomputations: by position, then by storage.
        self._recomputations: dict[int, dict[int, Recomputation | None]] = {}
        # Position and storage of the known recomputations that need a storage to be live.
        self._dependents: dict[int, list[tuple[int, int]]] = {}

    def is_dropped(self, position: int) -> bool:
        """Whether the run at a position has been removed."""
        return position in self._dropped

    def op_at(self, position: int) -> Op:
        """The op that the schedule runs at a position."""
        return self.graph.ops[self._steps[position]]

    def recompute_ms(self, positions: Ints) -> Floats:
        """The recompute times of the ops at these positions."""
        return self.costs.recompute_arrays.time_ms[self._def_use.steps[positions]]

    def bytes_before(self, position: int) -> int:
        """The live bytes right before the run at `position`."""
        op = self.op_at(position)
        reused_bytes = op.writes[0].num_bytes if position in self._schedule.in_place else 0
        own_bytes = op.written_bytes + self.costs.first[op.index].overhead_bytes - reused_bytes
        return int(self.live_bytes[position]) - own_bytes

    # --- events ---

    def _event(self, storage: int, position: int, kind: int) -> int:
        return storage << self._num_bits | position << KIND_BITS | kind

    def _position(self, event: int) -> int:
        return (event & (1 << self._num_bits) - 1) >> KIND_BITS

    def _index(self, event: int) -> int:
        """The index of an event, or of its successor if there is no such event."""
        return bisect_left(self._events, event)

    def _is_read(self, index: int, storage: int) -> bool:
        """Whether the event at an index is a read of the storage."""
        event = self._events[index]
        return bool(event & READ) and event >> self._num_bits == storage

    def _is_of(self, index: int, storage: int) -> bool:
        """Whether there is an event at an index and it belongs to the storage."""
        return index >= 0 and self._events[index] >> self._num_bits == storage

    def _delete_event(self, event: int) -> int | None:
        """Deletes an event and returns its former index; None if there is no such event."""
        index = self._index(event)
        if self._events[index] != event:
            return None
        del self._events[index]
        return index

    # --- gaps and evictions ---

    def gap_around(self, storage: int, position: int) -> tuple[int, int] | None:
        """The positions of a value's last event before `position` and of its next read after it.

        None if the value is not live there, or if the run there reads or makes it.
        """
        index = self._index(self._event(storage, position, _DEFINED_BEFORE))
        following = self._position(self._events[index])
        if not self._is_read(index, storage) or following == position:
            return None
        return self._position(self._events[index - 1]), following

    def gap_at_border(self, storage: int) -> tuple[int, int] | None:
        """The gap in which a value is live between forward and backward; None if it is not.

        It is none if nothing would be gained, with one forward in flight.
        """
        event = self._event(storage, len(self._schedule.forward), _DEFINED_BEFORE)
        if not self.border_weight or not self._is_read(index := self._index(event), storage):
            return None
        return self._position(self._events[index - 1]), self._position(self._events[index])

    def crosses_border(self, last: Any, following: Any) -> Any:
        """Whether a gap from one position to another has the border in it; also for arrays."""
        border = len(self._schedule.forward)
        return (last < border) & (following >= border)

    def gaps_around(self, position: int) -> SpillCandidates:
        """The gaps around `position` of all values that can be evicted.

        With several forwards in flight, also those around the border: an eviction there lowers the
        bytes of every position.
        """
        is_evictable = recompute_tables(self.graph).is_evictable
        events = np.frombuffer(self._events, dtype=np.int64)[:-1]
        storage, at = split_keys(events, self._num_bits)
        is_read = events & READ == READ
        is_around = (at[:-1] < position) & (at[1:] > position)
        if self.border_weight:
            is_around |= self.crosses_border(at[:-1], at[1:])
        before = np.flatnonzero(is_around & is_read[1:] & is_evictable[storage[1:]])
        definitions = np.flatnonzero(~is_read)
        definition = definitions[np.searchsorted(definitions, before, side="right") - 1]
        order = at[definition] * len(self.graph.storages) + storage[definition]
        for row in np.flatnonzero(events[definition] & KIND_MASK == _DEFINED_BEFORE).tolist():
            order[row] = self._order_of[int(events[definition[row]])]
        return SpillCandidates(
            storage=storage[before], last=at[before], following=at[before + 1], order=order
        )

    def recomputation(self, storage: int, position: int) -> Recomputation | None:
        """The ops that compute a value right before `position`.

        None if an op cannot be recomputed, or if there are more than `_MAX_RECOMPUTED_OPS`.
        """
        known = self._recomputations.setdefault(position, {})
        if storage not in known:
            known[storage] = self._find_recomputation(storage, position)
        return known[storage]

    def _find_recomputation(self, storage: int, position: int) -> Recomputation | None:
        tables, events, num_bits = recompute_tables(self.graph), self._events, self._num_bits
        inputs, producer = tables.inputs, int(tables.producer[storage])
        runs, pending, live = {producer}, [producer], []
        while pending:
            read = inputs[pending.pop()]
            if read is None or len(runs) > _MAX_RECOMPUTED_OPS:
                return None
            for needed, needed_producer in read:
                if needed_producer in runs:
                    continue
                # The hottest loop of the search: `_event` and `_is_read` are written out.
                before = needed << num_bits | position << KIND_BITS
                event = events[bisect_left(events, before)]
                if event == before or (event & READ and event >> num_bits == needed):
                    live.append(needed)
                else:
                    runs.add(needed_producer)
                    pending.append(needed_producer)
        for needed in live:
            self._dependents.setdefault(needed, []).append((position, storage))
        ops = tuple(self.graph.ops[index] for index in sorted(runs))
        return Recomputation(storage, ops, self.costs)

    def evict(self, recomputation: Recomputation, gap: tuple[int, int]) -> None:
        """Ends a live interval where a gap begins and recomputes the value before its end."""
        last, following = gap
        storage = recomputation.storage
        definition = self._event(storage, following, _DEFINED_BEFORE)
        rank = len(self._steps) * len(self.graph.storages) + len(self._order_of)
        self._order_of[definition] = rank
        insort(self._events, definition)
        num_bytes = self.graph.storages[storage].num_bytes
        self.live_bytes[last + 1 : following] -= num_bytes
        if self.crosses_border(last, following):
            self.live_bytes -= self.border_weight * num_bytes
        self._invalidate_recomputations(storage, gap)
        for op in recomputation.runs:
            self._inserted.setdefault(following, set()).add(op.index)
            self._extend_state(op, following)
            for needed, _ in recompute_tables(self.graph).inputs[op.index] or ():
                self._add_read(needed, following)

    def _invalidate_recomputations(self, storage: int, gap: tuple[int, int]) -> None:
        """Forgets the recomputations that read the evicted value in its gap, and all at its end."""
        last, following = gap
        self._recomputations.pop(following, None)
        for position, other in self._dependents.get(storage, ()):
            if last < position < following:
                self._recomputations.get(position, {}).pop(other, None)

    def _add_read(self, storage: int, position: int) -> None:
        """Adds a read by an inserted op, if the value is live there from before."""
        index = self._index(self._event(storage, position, _DEFINED_BEFORE))
        if self._is_read(index, storage) and self._position(self._events[index]) > position:
            self._events.insert(index, self._event(storage, position, READ))

    def _extend_state(self, op: Op, position: int) -> None:
        """Keeps an op's state live from its first run to the one inserted before `position`."""
        if op in self._state_positions:
            runs = self._state_positions[op]
            live_until = runs[-1] + 1 if len(runs) > 1 else runs[0]
            self.live_bytes[live_until : position + 1] += op.recompute_state_bytes
            if self.crosses_border(runs[-1], position):
                self.live_bytes += self.border_weight * op.recompute_state_bytes
            insort(runs, position)

    # --- removals ---

    def drop_candidates(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The extensions of live intervals that the removal of each recomputation takes.

        They refer to the schedule before any change. Operands that can then no longer be reused in
        place are left out.

        Returns:
            Columns with one row for each recomputed value that is read: position of the
            recomputation, first position, last position and number of bytes of the extension.
        """
        def_use = self._def_use
        is_result = def_use.ops.is_result[def_use.storage]
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
            def_use.ops.num_bytes[def_use.storage[made]],
        )

    def _last_before(self, storage: int, position: int) -> int | None:
        """The position of a value's last event before its definition at `position`.

        None if there is no such event, or if nothing reads what is defined.
        """
        index = self._index(self._event(storage, position, DEFINED))
        if self._is_of(index - 1, storage) and self._is_read(index + 1, storage):
            return self._position(self._events[index - 1])
        return None

    def extensions_for_drop(self, position: int) -> list[Extension]:
        """The extensions of earlier results that the removal of the run at `position` takes."""
        extensions: list[Extension] = []
        for storage in self.op_at(position).writes:
            end = self._last_before(storage.index, position)
            if end is None:
                continue
            extensions.append((end + 1, position - 1, storage.num_bytes))
            if end in self._schedule.in_place:
                extensions.append((end, end, self.op_at(end).writes[0].num_bytes))
        return extensions

    def must_stay(self, position: int) -> bool:
        """Whether the run at `position` makes a value that must not come from the forward."""
        marked, border = self.graph.must_recompute, len(self._schedule.forward)
        if not marked or position < border:
            return False
        made = marked.intersection(self.op_at(position).writes)
        ends = (self._last_before(storage.index, position) for storage in made)
        return any(end is not None and end < border for end in ends)

    def in_flight_bytes_for_drop(self, position: int) -> int:
        """The bytes that the removal of the run at `position` adds at every position.

        They are those that its results then take in the other forwards in flight.
        """
        if not self.border_weight or position < len(self._schedule.forward):
            return 0
        added = 0
        for storage in self.op_at(position).writes:
            end = self._last_before(storage.index, position)
            if end is not None and self.crosses_border(end, position):
                added += storage.num_bytes
        return self.border_weight * added

    def drop(self, position: int, extensions: Sequence[Extension]) -> None:
        """Removes the run at `position`, given its `extensions`, and runs that are then dead."""
        if self.border_weight:
            self.live_bytes += self.in_flight_bytes_for_drop(position)
        for first, last, num_bytes in extensions:
            self.live_bytes[first : last + 1] += num_bytes
        self._remove(position)

    def _remove(self, position: int) -> None:
        """Removes a run and those that only it needed; its readers then read earlier results."""
        op = self.op_at(position)
        self._dropped.add(position)
        for storage in op.writes:
            self._delete_event(self._event(storage.index, position, DEFINED))
        for storage in op.reads:
            index = self._delete_event(self._event(storage.index, position, READ))
            if index is None or self._is_read(index, storage.index):
                continue
            end = self._position(self._events[index - 1])
            self.live_bytes[end + 1 : position + 1] -= storage.num_bytes
            if self.crosses_border(end, position):
                self.live_bytes -= self.border_weight * storage.num_bytes
            is_unread = not self._is_read(index - 1, storage.index)
            if is_unread and self._is_of(index - 2, storage.index) and self._is_dead(end):
                self.live_bytes[end] -= storage.num_bytes
                self._remove(end)

    def _is_dead(self, position: int) -> bool:
        """Whether no result of the run at `position` is read before its next definition."""
        return not any(
            self._is_read(
                self._index(self._event(storage.index, position, DEFINED)) + 1, storage.index
            )
            for storage in self.op_at(position).writes
        )

    # --- the result ---

    def schedule(self) -> Schedule:
        """The schedule with all changes made."""
        if not self._inserted and not self._dropped:
            return self._schedule
        num_forward = len(self._schedule.forward)
        return finish(
            self.graph,
            self._changed_steps(0, num_forward),
            self._changed_steps(num_forward, len(self._steps)),
        )

    def _changed_steps(self, begin: int, end: int) -> list[int]:
        """The op indices from one position to another, with all changes made."""
        steps: list[int] = []
        changed = self._inserted.keys() | self._dropped
        for position in sorted(position for position in changed if begin <= position < end):
            steps += self._steps[begin:position]
            steps += sorted(self._inserted.get(position, ()))
            begin = position + (position in self._dropped)
        steps += self._steps[begin:end]
        return steps
