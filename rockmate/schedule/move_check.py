"""Whether moves fit a schedule: a walk over its runs that knows where each moved value is.

It shares no code with `schedule.liveness`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

import torch

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


def movable_storages(graph: Graph) -> frozenset[int]:
    """Indices of the values that may leave memory: they take some, and the step alone holds them.

    A value that is copied into a buffer or an input stays until then. One that the user marked does
    what the mark says.
    """
    return frozenset(
        storage.index
        for storage in graph.storages
        if storage.num_bytes > 0
        and storage not in graph.externally_held
        and storage not in graph.updates
        and not storage.mark
        and type(storage.root.meta["val"]).__name__ == "FakeTensor"
        and storage.root.meta["val"].layout is torch.strided
    )


class MoveWalk:
    """Where moved values are, run by run.

    Args:
        moves: the moves of a schedule.
        num_forward: number of runs of the forward.
    """

    def __init__(self, moves: Sequence[Move], num_forward: int) -> None:
        late = [move for move in moves if move.send > num_forward]
        assert not late, f"{late} begin in the backward"
        self._moves = moves
        self._events = placed_events(moves)[::-1]
        self._place: dict[int, _Place] = {}
        # Values that have come back and have not been read since.
        self._unread: set[int] = set()

    def pass_gap(self, gap: int) -> None:
        """Asserts that the events of the next gap may happen there."""
        while self._events and self._events[-1].gap <= gap:
            placed = self._events.pop()
            storage = self._moves[placed.index].storage
            before, after = _STEPS[placed.event]
            found = self._place.get(storage)
            assert placed.gap == gap and found is before, (
                f"{placed} of storage {storage}, which is {found and found.value} before {gap}"
            )
            self._place[storage] = after
            if placed.event is MoveEvent.FETCHED:
                self._unread.add(storage)

    def run(self, reads: Collection[int], writes: Collection[int]) -> None:
        """Asserts that what a run reads and makes is in memory, and nothing of it on its way."""
        for storage in reads:
            place = self._place.get(storage, _Place.HERE)
            assert place in _READABLE, f"storage {storage} is read while it is {place.value}"
            self._unread.discard(storage)
        for storage in writes:
            place = self._place.get(storage, _Place.HERE)
            assert place is _Place.HERE, f"storage {storage} is made while it is {place.value}"
            self._place[storage] = _Place.HERE

    def end(self) -> None:
        """Asserts that every move has ended, and was of use."""
        assert not self._events, f"{self._events} stand behind the last run"
        assert not self._unread, f"storages {sorted(self._unread)} come back and nobody reads them"
