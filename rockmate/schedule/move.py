"""Moves: a value leaves the device's memory and comes back, in four events without compute time.

A gap is a place between two runs of a schedule; gap g stands before the run at position g. A move
has one event in each of four gaps, in this order:

| event | what it does | memory |
|---|---|---|
| send | a copy out begins | the slot in the other tier is taken |
| sent | the step waits until that copy has ended | the value's memory is released |
| fetch | a copy back begins | memory for the value is taken |
| fetched | the step waits until that copy has ended | the slot is released |

Between sent and fetched no run reads the value. So which bytes are in memory follows from the order
of runs and events alone, and only the time depends on the rate of the copies. If that was
misjudged, the step waits longer and keeps its budget.

Within a gap all sends come first, then sent, fetch and fetched: memory is released before it is
taken.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rockmate.graph.in_place import may_be_saved_opaquely
from rockmate.graph.ir import Graph

# Slots in the other tier begin at multiples of it, so that a copy can bypass the page cache.
SLOT_ALIGNMENT = 4096


class MoveEvent(enum.IntEnum):
    """The events of a move, in the order in which they stand within a gap."""

    SEND = 0
    SENT = 1
    FETCH = 2
    FETCHED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One way out and back of one value.

    Attributes:
        storage: index of the storage.
        send: gap in which the copy out begins; it stands in the forward or at its end.
        sent: gap in which the step waits for it.
        fetch: gap in which the copy back begins.
        fetched: gap in which the step waits for it.
    """

    storage: int
    send: int
    sent: int
    fetch: int
    fetched: int

    @property
    def events(self) -> list[tuple[int, MoveEvent]]:
        """Its events, each behind its gap."""
        gaps = (self.send, self.sent, self.fetch, self.fetched)
        return list(zip(gaps, MoveEvent, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One stretch of a schedule in which a weight, whose home is another tier, is in memory.

    It has the last two events of a move. Nothing is written back: behind the last run that reads
    the weight its memory is released. What the plan reads again later comes by a further fetch.

    Attributes:
        storage: index of the storage.
        fetch: gap in which its copy begins.
        fetched: gap in which the step waits for it, in the same half of the step.
        last: position of the last run that reads it.
    """

    storage: int
    fetch: int
    fetched: int
    last: int

    @property
    def events(self) -> list[tuple[int, MoveEvent]]:
        """Its events, each behind its gap."""
        return [(self.fetch, MoveEvent.FETCH), (self.fetched, MoveEvent.FETCHED)]


class PlacedEvent(NamedTuple):
    """An event in a gap, and the index of its move."""

    gap: int
    event: MoveEvent
    index: int

    def is_in_forward(self, num_forward: int) -> bool:
        """Whether it belongs to the forward: what ends a move out does at the border, too."""
        is_out = self.event in (MoveEvent.SEND, MoveEvent.SENT)
        return self.gap < num_forward or (self.gap == num_forward and is_out)


def placed_events(copies: Sequence[Move | Fetch]) -> list[PlacedEvent]:
    """All events of some moves and fetches in the order in which they happen.

    Copies back that begin in the same gap do so in the order in which they are waited for.
    """
    found = [
        (gap, event, each.fetched, index)
        for index, each in enumerate(copies)
        for gap, event in each.events
    ]
    return [PlacedEvent(gap, event, index) for gap, event, _, index in sorted(found)]


class SlotPlan(NamedTuple):
    """Where each move's bytes wait.

    Attributes:
        offsets: first byte of each move's slot.
        sizes: bytes of each slot.
        num_bytes: bytes of all together, from the first to the last.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int


def plan_slots(moves: Sequence[Move], num_bytes: Sequence[int]) -> SlotPlan:
    """Slots for moves: those that are taken at the same time do not overlap. Largest first."""
    sizes = [-(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for size in num_bytes]
    offsets = [0] * len(moves)
    placed: list[int] = []
    for index in sorted(range(len(moves)), key=lambda index: (-sizes[index], moves[index].send)):
        offsets[index] = _first_fit(
            [
                (offsets[other], offsets[other] + sizes[other])
                for other in placed
                if moves[other].send <= moves[index].fetched  # behind which a slot is free
                and moves[index].send <= moves[other].fetched
            ],
            sizes[index],
        )
        placed.append(index)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    return SlotPlan(tuple(offsets), tuple(sizes), max(ends, default=0))


def _first_fit(taken: list[tuple[int, int]], size: int) -> int:
    """The lowest offset from which `size` bytes are free."""
    offset = 0
    for begin, end in sorted(taken):
        if offset + size <= begin:
            return offset
        offset = max(offset, end)
    return offset


class _Place(enum.Enum):
    HERE = "in memory"
    LEAVING = "being copied out"
    AWAY = "moved away"
    COMING = "being copied back"


_STEPS = {
    MoveEvent.SEND: (_Place.HERE, _Place.LEAVING),
    MoveEvent.SENT: (_Place.LEAVING, _Place.AWAY),
    MoveEvent.FETCH: (_Place.AWAY, _Place.COMING),
    MoveEvent.FETCHED: (_Place.COMING, _Place.HERE),
}
_READABLE = (_Place.HERE, _Place.LEAVING)


def movable_storages(graph: Graph, device_type: str = "") -> frozenset[int]:
    """Indices of the values that may leave memory: they take some, and the step alone holds them.

    A value that is copied into a buffer or an input stays until then. One that the user marked does
    what the mark says. What an opaque module takes or returns may be held by its autograd graph.
    With a type of device, only values on such devices may leave.
    """
    return frozenset(
        storage.index
        for storage in graph.storages
        if storage.num_bytes > 0
        and storage not in graph.externally_held
        and storage not in graph.updates
        and not storage.mark
        and not may_be_saved_opaquely(graph, storage)
        and _is_plain(storage.root.meta["val"], device_type)
    )


def _is_plain(value: Any, device_type: str) -> bool:
    """Whether a traced value is a strided tensor of no class of its own."""
    return (
        type(value).__name__ == "FakeTensor"
        and value.layout is torch.strided
        and value.device.type == (device_type or value.device.type)
    )


class MoveError(ValueError):
    """Moves that do not fit a schedule."""


class MoveWalk:
    """Where moved values are, run by run. Its methods raise `MoveError`.

    It shares no code with `schedule.liveness`.
    """

    def __init__(self, moves: Sequence[Move], num_forward: int) -> None:
        for move in moves:
            if move.send > num_forward:
                raise MoveError(f"the move of storage {move.storage} begins in the backward")
        self._moves = moves
        self._events = placed_events(moves)[::-1]
        self._place: dict[int, _Place] = {}
        # Values that have come back and have not been read since.
        self._unread: set[int] = set()

    def pass_gap(self, gap: int) -> None:
        """Checks that the events of the next gap may happen there."""
        while self._events and self._events[-1].gap <= gap:
            placed = self._events.pop()
            storage = self._moves[placed.index].storage
            before, after = _STEPS[placed.event]
            found = self._place.get(storage)
            if placed.gap != gap or found is not before:
                where = "not made" if found is None else found.value
                event = placed.event.name.lower()
                msg = f"{event} of storage {storage} before step {placed.gap}, where it is {where}"
                raise MoveError(msg)
            self._place[storage] = after
            if placed.event is MoveEvent.FETCHED:
                self._unread.add(storage)

    def run(self, reads: Collection[int], writes: Collection[int]) -> None:
        """Checks that what a run reads and makes is in memory, and nothing of it on its way."""
        for storage in reads:
            place = self._place.get(storage, _Place.HERE)
            if place not in _READABLE:
                raise MoveError(f"storage {storage} is read while it is {place.value}")
            self._unread.discard(storage)
        for storage in writes:
            place = self._place.get(storage, _Place.HERE)
            if place is not _Place.HERE:
                raise MoveError(f"storage {storage} is made while it is {place.value}")
            self._place[storage] = _Place.HERE

    def end(self) -> None:
        """Checks that every move has ended, and was of use."""
        if self._events:
            raise MoveError(f"{self._events} stand behind the last step")
        if self._unread:
            raise MoveError(f"storages {sorted(self._unread)} come back and nobody reads them")


def broken_fetch(fetches: Sequence[Fetch], reads: Sequence[Sequence[int]], num_forward: int) -> str:
    """The first fault of a schedule's fetches, in words; empty if there is none.

    `reads` has for each run the storages that it reads.
    """
    begun: dict[int, list[Fetch]] = {each.storage: [] for each in fetches}
    for each in sorted(fetches, key=lambda each: each.fetch):
        own, text = begun[each.storage], f"the fetch of storage {each.storage} at gap {each.fetch}"
        if not 0 <= each.fetch <= each.fetched <= each.last < len(reads):
            return f"{text} does not end behind its begin and within the step"
        if (each.fetch < num_forward) != (each.fetched < num_forward):
            return f"{text} is awaited in the other half of the step"
        if own and own[-1].last >= each.fetch:
            return f"{text} begins while the weight is in memory"
        if each.storage not in reads[each.last]:
            return f"{text} outlives its last read"
        own.append(each)
    for position, storages in enumerate(reads):
        for storage in storages:
            known = begun.get(storage)
            if known is not None and not any(f.fetched <= position <= f.last for f in known):
                return f"step {position} reads storage {storage}, which is not in memory"
    return ""
