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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

    def gap_of(self, event: MoveEvent) -> int:
        """The gap of one of its events."""
        return (self.send, self.sent, self.fetch, self.fetched)[event]


class PlacedEvent(NamedTuple):
    """An event of one of several moves.

    Attributes:
        gap: the gap in which it stands.
        event: which of the four it is.
        index: index of the move.
    """

    gap: int
    event: MoveEvent
    index: int

    def is_in_forward(self, num_forward: int) -> bool:
        """Whether it belongs to the forward: what ends a move out does at the border, too."""
        is_out = self.event in (MoveEvent.SEND, MoveEvent.SENT)
        return self.gap < num_forward or (self.gap == num_forward and is_out)


def placed_events(moves: Sequence[Move]) -> list[PlacedEvent]:
    """All events of some moves in the order in which they happen.

    Copies back that begin in the same gap do so in the order in which they are waited for.
    """
    found = [
        (move.gap_of(event), event, move.fetched, index)
        for index, move in enumerate(moves)
        for event in MoveEvent
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
    """Slots for moves: those that are taken at the same time do not overlap. Largest first.

    Args:
        moves: the moves.
        num_bytes: bytes of each of them.
    """
    sizes = [-(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for size in num_bytes]
    offsets = [0] * len(moves)
    placed: list[int] = []
    for index in sorted(range(len(moves)), key=lambda index: (-sizes[index], moves[index].send)):
        offsets[index] = _first_fit(
            [
                (offsets[other], offsets[other] + sizes[other])
                for other in placed
                if _overlap(moves[other], moves[index])
            ],
            sizes[index],
        )
        placed.append(index)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    return SlotPlan(tuple(offsets), tuple(sizes), max(ends, default=0))


def _overlap(one: Move, other: Move) -> bool:
    """Whether both slots are taken at some time; a slot is free behind the gap of `fetched`."""
    return one.send <= other.fetched and other.send <= one.fetched


def _first_fit(taken: list[tuple[int, int]], size: int) -> int:
    """The lowest offset from which `size` bytes are free."""
    offset = 0
    for begin, end in sorted(taken):
        if offset + size <= begin:
            return offset
        offset = max(offset, end)
    return offset


def move_rows(moves: Sequence[Move], names: Sequence[str]) -> list[str]:
    """One line for each move: its gaps, index and name of the storage."""
    return [
        f"send {move.send} sent {move.sent} fetch {move.fetch} fetched {move.fetched} "
        f"{move.storage} {names[move.storage]}"
        for move in moves
    ]


def moves_of_rows(rows: Sequence[str]) -> Iterator[Move]:
    """The moves that `move_rows` wrote.

    Raises:
        ValueError: a row is none of its.
    """
    for row in rows:
        words = row.split()
        if words[0:8:2] != ["send", "sent", "fetch", "fetched"] or len(words) != 10:
            msg = f"a move reads {row!r}, not like 'send 3 sent 9 fetch 40 fetched 44 17 gelu'"
            raise ValueError(msg)
        send, sent, fetch, fetched, storage = map(int, (*words[1:8:2], words[8]))
        yield Move(storage=storage, send=send, sent=sent, fetch=fetch, fetched=fetched)
