"""Whether moves fit a schedule: a walk over its runs that knows where each moved value is.

It shares no code with `schedule.liveness`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import Any

import torch

from rockmate.graph.in_place import may_be_saved_opaquely
from rockmate.graph.ir import Graph
from rockmate.schedule.move import Move, MoveEvent, placed_events


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

    Args:
        graph: the step.
        device_type: of the values that may leave; empty for any.
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

    Args:
        moves: the moves of a schedule.
        num_forward: number of runs of the forward.
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
