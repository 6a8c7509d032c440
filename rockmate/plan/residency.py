"""When each storage of a schedule is in memory, and through which runs: read off the order of runs alone.

A read takes the result of the latest run; a result is released after its last read before the next run of the same op. Outputs and
returned gradients stay until the step ends, tangents from the start of the backward, and what is copied into a buffer until the
forward has ended. Works on an `StepSnapshot`, so it needs no captured graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rockmate.costs.cost import Costs
from rockmate.graph.snapshot import StepSnapshot, StorageKind
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation


@dataclass(eq=False, slots=True)
class LiveInterval:
    """One stay of a storage in memory.

    Attributes:
        storage: its index.
        first: position of the run that makes it; of a tangent, the first of the backward.
        last: position of the run after which it is released.
        reads: positions of the runs that read it, ascending.
        is_repeated: whether it has been in memory before.
    """

    storage: int
    first: int
    last: int
    reads: list[int] = field(default_factory=list)
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class LiveItem:
    """What takes memory while one run of a schedule goes on: a storage, or what an op needs to run again, or its overhead.

    Attributes:
        num_bytes: how much.
        storage: index of the storage, None for the other two.
        op: index of the op whose state or overhead it is.
        what: "storage", "overhead", or what the state is, as `SnapshotOp.state_name` says.
    """

    num_bytes: int
    storage: int | None = None
    op: int | None = None
    what: str = "storage"


class Residency:
    """All stays of a schedule.

    Attributes:
        intervals: for each storage that is counted, its stays in order.
    """

    def __init__(self, snapshot: StepSnapshot, schedule: Schedule) -> None:
        """Reads the stays off `schedule`.

        Raises:
            ValueError: an op reads a storage before it is made; the text names both.
        """
        self.snapshot = snapshot
        self.schedule = schedule
        self.intervals: dict[int, list[LiveInterval]] = {}
        self._first_run: dict[int, int] = {}
        self._last_run: dict[int, int] = {}
        steps, num_forward = schedule.steps, len(schedule.forward)
        for position, index in enumerate(steps):
            if position == num_forward:
                self._end_forward(num_forward)
            self._first_run.setdefault(index, position)
            self._last_run[index] = position
            self._run(position, index)
        if not schedule.backward:
            self._end_forward(num_forward)
        for stay in self.all():
            if snapshot.storages[stay.storage].kind in (
                StorageKind.OUTPUT,
                StorageKind.RETURNED_GRADIENT,
                StorageKind.TANGENT,
            ):
                stay.last = len(steps) - 1

    def _run(self, position: int, index: int) -> None:
        op = self.snapshot.ops[index]
        for storage in op.reads:
            if not self.snapshot.storages[storage].kind.is_static:
                if storage not in self.intervals:
                    msg = f"step {position} ({op.name}) reads {self.snapshot.storages[storage].name} before it is made"
                    raise ValueError(msg)
                stay = self.intervals[storage][-1]
                stay.reads.append(position)
                stay.last = position
        for storage in op.writes:
            known = self.intervals.setdefault(storage, [])
            known.append(LiveInterval(storage, position, position, is_repeated=bool(known)))

    def _end_forward(self, num_forward: int) -> None:
        for storage in self.snapshot.updates:
            if storage in self.intervals:
                self.intervals[storage][-1].last = num_forward - 1
        for storage, described in enumerate(self.snapshot.storages):
            if described.kind is StorageKind.TANGENT:
                self.intervals[storage] = [LiveInterval(storage, num_forward, num_forward)]

    def all(self) -> Iterator[LiveInterval]:
        """Every stay."""
        return (stay for residency in self.intervals.values() for stay in residency)

    def is_saved(self, storage: int) -> bool:
        """Whether the storage is in memory from the forward into the backward."""
        num_forward = len(self.schedule.forward)
        return any(
            stay.first < num_forward <= stay.last for stay in self.intervals.get(storage, ())
        )

    def live_items_at(self, position: int, costs: Costs) -> list[LiveItem]:
        """What takes memory while the run at `position` goes on.

        A result that takes over the memory of an operand (a run in place) is left out: the operand stands for both.
        """
        index = self.schedule.steps[position]
        op = self.snapshot.ops[index]
        taken = op.writes[0] if position in self.schedule.in_place else None
        occupants = [
            LiveItem(self.snapshot.storages[stay.storage].num_bytes, storage=stay.storage)
            for stay in self.all()
            if stay.first <= position <= stay.last
            and not (stay.storage == taken and stay.first == position)
        ]
        for drawn, first in self._first_run.items():
            if (
                self.snapshot.ops[drawn].state_bytes
                and first <= position <= self._last_run[drawn] != first
            ):
                occupants.append(
                    LiveItem(
                        self.snapshot.ops[drawn].state_bytes,
                        op=drawn,
                        what=self.snapshot.ops[drawn].state_name,
                    )
                )
        overhead = (costs.first if self._first_run[index] == position else costs.recompute)[
            index
        ].overhead_bytes
        if overhead:
            occupants.append(LiveItem(overhead, op=index, what="overhead"))
        return occupants

    def simulation(self, costs: Costs) -> Simulation:
        """The same replay as the simulator's, from the stays alone."""
        live = self.live_bytes(costs)
        peak, seen, time_ms = max(live, default=0), set[int](), 0.0
        for index in self.schedule.steps:
            time_ms += (costs.recompute if index in seen else costs.first)[index].time_ms
            seen.add(index)
        return Simulation(
            peak_bytes=peak,
            peak_position=live.index(peak) if live else 0,
            time_ms=time_ms,
            live_bytes=live,
            saved_bytes=self.saved_bytes(),
        )

    def saved_bytes(self) -> int:
        """In memory when the forward has ended, random states included."""
        num_forward = len(self.schedule.forward)
        saved = sum(
            self.snapshot.storages[stay.storage].num_bytes
            for stay in self.all()
            if stay.first < num_forward <= stay.last
        )
        states = (
            i for i, first in self._first_run.items() if first < num_forward <= self._last_run[i]
        )
        return saved + sum(self.snapshot.ops[index].state_bytes for index in states)

    def live_bytes(self, costs: Costs) -> tuple[int, ...]:
        """For each run, the bytes in use while it goes on."""
        steps, in_place = self.schedule.steps, self.schedule.in_place
        change = [0] * (len(steps) + 1)
        for stay in self.all():
            num_bytes = self.snapshot.storages[stay.storage].num_bytes
            change[stay.first] += num_bytes
            change[stay.last + 1] -= num_bytes
        for index, first in self._first_run.items():
            if self._last_run[index] != first:
                change[first] += self.snapshot.ops[index].state_bytes
                change[self._last_run[index] + 1] -= self.snapshot.ops[index].state_bytes
        live, found = 0, []
        for position, index in enumerate(steps):
            live += change[position]
            overhead = (costs.first if self._first_run[index] == position else costs.recompute)[
                index
            ].overhead_bytes
            taken = (
                self.snapshot.storages[self.snapshot.ops[index].writes[0]].num_bytes
                if position in in_place
                else 0
            )
            found.append(live + overhead - taken)
        return tuple(found)
