"""Gathers that are issued ahead of their run, and reductions that are awaited behind it.

A collective keeps the link busy, not the device. A schedule says where a gathered parameter must be
there, and where a gradient is final. Between the *issue* of a collective and its *wait* other ops
run: a gather is issued ahead of the position where it stands, a reduction is awaited after it. Such
a stretch is a *flight*.

Flights are chosen for a finished schedule. They take memory only where the schedule leaves some
below its own peak, so they change neither the peak nor any number. The link has one lane:
collectives run on it one by one, in the order in which they are issued.

- A gather is issued as late as it can be to have ended when its first reader runs, and when the
  next gather needs the link.
- A reduction is issued where its gradients are final, and awaited once the link has had the time
  for it.

All ranks run one plan, hence one order of collectives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.ops.collectives import is_communication
from rockmate.ops.shards import GATHER, REDUCE
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation


@dataclass(frozen=True)
class Flights:
    """The flights of a schedule.

    Attributes:
        other_end: position of a gather -> position of the run before which it is issued; position
            of a reduction -> position of the run after which it is awaited.
    """

    other_end: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def issued_before(self) -> Mapping[int, Sequence[int]]:
        """Position -> gathers that are issued before its run, in the order of their use."""
        return self._grouped(is_ahead=True)

    @cached_property
    def awaited_after(self) -> Mapping[int, Sequence[int]]:
        """Position -> reductions that are awaited after its run, in their order."""
        return self._grouped(is_ahead=False)

    def is_awaited_later(self, position: int) -> bool:
        """Whether the run at a position issues a reduction only."""
        return self.other_end.get(position, position) > position

    def _grouped(self, *, is_ahead: bool) -> Mapping[int, Sequence[int]]:
        found = defaultdict[int, list[int]](list)
        for position, other in sorted(self.other_end.items()):
            if (other < position) == is_ahead:
                found[other].append(position)
        return found

    def issue_order(self, schedule: Schedule) -> list[int]:
        """Positions of all runs in the order in which they begin: gathers where they are issued."""
        order: list[int] = []
        for position in range(len(schedule.steps)):
            order += self.issued_before.get(position, ())
            if self.other_end.get(position, position) >= position:  # else it only waits
                order.append(position)
        return order


def flights_of(graph: Graph, schedule: Schedule, costs: Costs, simulation: Simulation) -> Flights:
    """The flights of a schedule within its own peak."""
    search = _Search(graph, schedule, costs, simulation)
    num_forward = len(schedule.forward)
    for begin, end in ((0, num_forward), (num_forward, len(schedule.steps))):
        search.issue_gathers(begin, end)
        search.await_reductions(begin, end)
    return Flights(search.other_end)


def overlapped_ms(graph: Graph, schedule: Schedule, costs: Costs, flights: Flights) -> float:
    """Time of a step in which flights run beside other ops.

    A replay on two lanes, device and link, that shares nothing with the choice of flights.
    """
    device_ms = link_ms = 0.0
    done_ms: dict[int, float] = {}

    def issue(position: int) -> None:
        nonlocal link_ms
        link_ms = max(link_ms, device_ms) + times[position]
        done_ms[position] = link_ms

    times = [each.time_ms for each in schedule.run_costs(costs)]
    for position, index in enumerate(schedule.steps):
        for ahead in flights.issued_before.get(position, ()):
            issue(ahead)
        if is_communication(graph.ops[index].node.target):
            if position not in done_ms:
                issue(position)
            if not flights.is_awaited_later(position):
                device_ms = max(device_ms, done_ms[position])
        else:
            device_ms += times[position]
        for awaited in flights.awaited_after.get(position, ()):
            device_ms = max(device_ms, done_ms[awaited])
    return device_ms


class _Search:
    """Choices so far, and the memory that they leave below the peak."""

    def __init__(
        self, graph: Graph, schedule: Schedule, costs: Costs, simulation: Simulation
    ) -> None:
        self.other_end: dict[int, int] = {}
        self._ops = [graph.ops[index] for index in schedule.steps]
        targets: list[Any] = [op.node.target for op in self._ops]
        self._gathers = [
            position
            for position, target in enumerate(targets)
            if target is GATHER and all(each.is_static for each in self._ops[position].reads)
        ]
        partial = Counter(role.name for op in graph.ops for _, role in op.final_gradients)
        read = {storage for op in graph.ops for storage in op.reads}
        self._reductions = [
            position
            for position, target in enumerate(targets)
            if target is REDUCE
            and read.isdisjoint(self._ops[position].writes)
            and all(partial[role.name] == 1 for _, role in self._ops[position].final_gradients)
        ]
        self._spare_bytes = [simulation.peak_bytes - live for live in simulation.live_bytes]
        self._link_ms = [each.time_ms for each in schedule.run_costs(costs)]
        # When each run begins if no collective takes any time of the device.
        self._begin_ms = [0.0]
        for target, time_ms in zip(targets, self._link_ms, strict=True):
            own_ms = 0.0 if is_communication(target) else time_ms
            self._begin_ms.append(self._begin_ms[-1] + own_ms)
        self._flight_bytes = [
            costs.first[op.index].overhead_bytes + sum(each.num_bytes for each in op.writes)
            for op in self._ops
        ]

    def issue_gathers(self, begin: int, end: int) -> None:
        """Chooses where gathers in one half of the step are issued.

        None is issued before one that is read earlier: it would wait for the link behind it.
        """
        gathers = [each for each in self._gathers if begin <= each < end]
        first_allowed = begin
        for position, latest_ms in zip(gathers, self._latest_ms(gathers, end), strict=True):
            issue = position
            while issue > first_allowed and self._begin_ms[issue] > latest_ms:
                if self._spare_bytes[issue - 1] < self._flight_bytes[position]:
                    break
                issue -= 1
            self._add(position, issue, range(issue, position))
            first_allowed = issue if issue < position else position + 1

    def _latest_ms(self, gathers: Sequence[int], end: int) -> list[float]:
        """When each gather has to begin so that none is waited for."""
        found, next_ms = list[float](), self._begin_ms[end]
        for position in reversed(gathers):
            next_ms = min(next_ms, self._begin_ms[position]) - self._link_ms[position]
            found.append(next_ms)
        return found[::-1]

    def await_reductions(self, begin: int, end: int) -> None:
        """Chooses where reductions in one half of the step are awaited."""
        free_ms = 0.0
        for position in [each for each in self._reductions if begin <= each < end]:
            free_ms = max(free_ms, self._begin_ms[position]) + self._link_ms[position]
            wait = position
            while wait + 1 < end and self._begin_ms[wait + 1] < free_ms:
                if self._spare_bytes[wait + 1] < self._flight_bytes[position]:
                    break
                wait += 1
            self._add(position, wait, range(position + 1, wait + 1))

    def _add(self, position: int, other: int, flown: range) -> None:
        if other != position:
            self.other_end[position] = other
            for each in flown:
                self._spare_bytes[each] -= self._flight_bytes[position]
