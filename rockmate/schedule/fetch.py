"""Fetches: a frozen weight comes from its home to the device's memory, and is dropped after a read.

A weight whose home is another memory tier is not in memory when the step begins. A *fetch* is an
interval in which it is: a copy begins in one gap of the schedule, the step waits for it in another,
and behind the last run that reads it its memory is released. Nothing is written back. What the plan
reads again later comes by a further fetch. Bytes follow from the order of runs and events alone, as
for a `Move`, whose last two events these are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rockmate.schedule.move import MoveEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One stretch of a schedule in which a weight is in memory.

    Attributes:
        storage: index of the storage.
        fetch: gap in which its copy begins.
        fetched: gap in which the step waits for it, in the same half of the step.
        last: position of the last run that reads it.
    """

    events: ClassVar[Collection[MoveEvent]] = (MoveEvent.FETCH, MoveEvent.FETCHED)

    storage: int
    fetch: int
    fetched: int
    last: int

    def gap_of(self, event: MoveEvent) -> int:
        """The gap of one of its events."""
        return self.fetch if event is MoveEvent.FETCH else self.fetched


def broken_fetch(fetches: Sequence[Fetch], reads: Sequence[Sequence[int]], num_forward: int) -> str:
    """The first fault of a schedule's fetches, in words; empty if there is none.

    Args:
        fetches: of the schedule.
        reads: for each run the storages that it reads.
        num_forward: number of runs of the forward.
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
