"""Residency: the live intervals of a plan's values.

Derived from `schedule.liveness` on a `StepSnapshot`, because a saved plan has no graph.
Outputs and returned gradients are live to the end of the step, tangents from the start of the
backward, and a value that is copied into a buffer at least to the end of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rockmate.costs.cost import Costs
from rockmate.graph.snapshot import StepSnapshot, StorageKind
from rockmate.schedule.liveness import DEFINED, FETCHED, KIND_MASK, READ, DefUse, OpDefUse
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation, simulate_def_use


@dataclass(eq=False, slots=True)
class LiveInterval:
    """One live interval of a storage.

    Attributes:
        storage: index of the storage.
        first: position of the run that makes it; for a tangent, the first run of the backward.
        last: position of the run after which it is released.
        reads: positions of the runs that read it, ascending.
        is_repeated: whether an earlier interval of the same storage exists.
        is_fetched: whether a copy from another tier begins it.
        is_sent: whether a copy to another tier ends it.
    """

    storage: int
    first: int
    last: int
    reads: list[int] = field(default_factory=list)
    is_repeated: bool = False
    is_fetched: bool = False
    is_sent: bool = False


class Residency:
    """The live intervals of a schedule.

    Attributes:
        snapshot: the step.
        schedule: the runs.
        intervals: for each counted storage its live intervals in order.
        first_run: for each op that runs, the position of its first run.
        last_run: the same of its last run.
    """

    def __init__(self, snapshot: StepSnapshot, schedule: Schedule) -> None:
        self.snapshot, self.schedule = snapshot, schedule
        self._def_use = DefUse.of(_op_def_use(snapshot), *schedule.order)
        self.first_run: dict[int, int] = {}
        self.last_run: dict[int, int] = {}
        for position, index in enumerate(schedule.steps):
            self.first_run.setdefault(index, position)
            self.last_run[index] = position
        self.intervals = self._defined_intervals()
        self._add_tangents()
        self._extend_results()
        sent = {(move.storage, move.sent - 1) for move in schedule.moves}
        for interval in self.all():
            interval.is_sent = (interval.storage, interval.last) in sent

    def _defined_intervals(self) -> dict[int, list[LiveInterval]]:
        """The intervals of values that ops make, from definition to last read."""
        def_use = self._def_use
        kinds = def_use.keys & KIND_MASK
        accesses = (def_use.storage.tolist(), def_use.position.tolist(), kinds.tolist())
        intervals: dict[int, list[LiveInterval]] = {}
        for storage, position, kind in zip(*accesses, strict=True):
            known = intervals.setdefault(storage, [])
            if kind in (DEFINED, FETCHED):
                interval = LiveInterval(
                    storage, position, position, is_repeated=bool(known), is_fetched=kind == FETCHED
                )
                known.append(interval)
            elif known:
                known[-1].last = position
                if kind == READ:
                    known[-1].reads.append(position)
        return intervals

    def _add_tangents(self) -> None:
        steps, num_forward = self.schedule.steps, len(self.schedule.forward)
        for storage, described in enumerate(self.snapshot.storages):
            if described.kind is StorageKind.TANGENT and self.schedule.backward:
                reads = [
                    position
                    for position in range(num_forward, len(steps))
                    if storage in self.snapshot.ops[steps[position]].reads
                ]
                interval = LiveInterval(storage, num_forward, len(steps) - 1, reads)
                self.intervals[storage] = [interval]

    def _extend_results(self) -> None:
        """Extends the intervals of results to the end of the step.

        The simulator counts the second copy of a result that a recomputation makes to the end, too.
        """
        steps, storages = self.schedule.steps, self.snapshot.storages
        for position, index in enumerate(steps):
            if self.first_run[index] != position:
                for storage in self.snapshot.ops[index].writes:
                    if storages[storage].kind.is_result:
                        interval = LiveInterval(storage, position, position, is_repeated=True)
                        self.intervals[storage].append(interval)
        for interval in self.all():
            if storages[interval.storage].kind.is_result:
                interval.last = len(steps) - 1

    def all(self) -> Iterator[LiveInterval]:
        """Every interval."""
        return (interval for intervals in self.intervals.values() for interval in intervals)

    def is_saved(self, storage: int) -> bool:
        """Whether the storage is live from the forward into the backward."""
        num_forward = len(self.schedule.forward)
        return any(i.first < num_forward <= i.last for i in self.intervals.get(storage, ()))

    def simulation(self, costs: Costs) -> Simulation:
        """Memory and time of the schedule, as `simulate` gives them for a graph."""
        return simulate_def_use(self._def_use, self.schedule, costs)


def _op_def_use(snapshot: StepSnapshot) -> OpDefUse:
    """Reads and writes of a snapshot's ops, the same as of the graph that it was taken from."""
    ops, storages = snapshot.ops, snapshot.storages
    return OpDefUse.of(
        reads=[op.reads for op in ops],
        writes=[op.writes for op in ops],
        is_random=(op.is_random for op in ops),
        has_final_gradient=(bool(op.final_gradients) for op in ops),
        state_bytes=(op.state_bytes for op in ops),
        num_bytes=(storage.num_bytes for storage in storages),
        is_static=(storage.kind.is_static for storage in storages),
        is_tangent=(storage.kind is StorageKind.TANGENT for storage in storages),
        is_result=(storage.kind.is_result for storage in storages),
        updates=snapshot.updates,
        returned=(storage for _, storage in snapshot.outputs),
        num_in_flight=snapshot.num_in_flight,
    )
