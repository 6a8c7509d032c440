"""Replays a schedule on storage sizes: live bytes at every run, the peak and where it is.

This is the measure by which plans are compared and the figure that is held against the allocator. It knows nothing of blocks,
options or solvers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rockmate.costs import Costs
from rockmate.graph import Graph, Op, Phase, Storage
from rockmate.in_place import dying_operand
from rockmate.random_state import CPU_STATE_BYTES
from rockmate.schedule import Schedule, last_reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule takes.

    Attributes:
        peak_bytes: largest sum of live storages and the running op's own overhead.
        peak_position: position of that run in `Schedule.steps`.
        time_ms: sum of the costs of all runs.
        live_bytes: for each run, the bytes in use while it runs.
        saved_bytes: live when the forward has ended, what the user holds included.
    """

    peak_bytes: int
    peak_position: int
    time_ms: float
    live_bytes: tuple[int, ...]
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSimulation:
    """What a stretch of a schedule takes: the peak of what it makes and is given, and its time."""

    peak_bytes: int
    time_ms: float


def simulate(graph: Graph, schedule: Schedule, costs: Costs) -> Simulation:
    """Replays `schedule`; see `Simulation`."""
    steps, num_forward = schedule.steps, len(schedule.forward)
    ends = schedule.ends or last_reads(graph, schedule.forward, schedule.backward)
    num_runs = Counter(steps)
    ran = [0] * len(graph.ops)
    written_bytes = graph.written_bytes
    live = saved = 0
    time_ms = 0.0
    live_bytes = []
    for position, index in enumerate(steps):
        if position == num_forward:
            saved = live
            live += sum(storage.num_bytes for storage in graph.storages if storage.is_tangent)
        cost = (costs.again if ran[index] else costs.first)[index]
        ran[index] += 1
        time_ms += cost.time_ms
        is_repeated = num_runs[index] > 1
        if is_repeated and ran[index] == 1:
            live += state_bytes(graph.ops[index])
        live += written_bytes[index]
        taken = graph.ops[index].writes[0].num_bytes if position in schedule.in_place else 0
        live_bytes.append(live - taken + cost.overhead_bytes)
        for storage in ends[position]:
            live -= storage.num_bytes
        if is_repeated and ran[index] == num_runs[index]:
            live -= state_bytes(graph.ops[index])
    peak = max(live_bytes, default=0)
    return Simulation(
        peak_bytes=peak,
        peak_position=live_bytes.index(peak) if live_bytes else 0,
        time_ms=time_ms,
        live_bytes=tuple(live_bytes),
        saved_bytes=saved if schedule.backward else live,
    )


def simulate_part(
    graph: Graph,
    steps: Sequence[int],
    costs: Costs,
    *,
    before: Collection[Storage],
    after: Collection[Storage],
    uncounted: Collection[Storage] = (),
    again: bool = False,
) -> PartSimulation:
    """Replays a stretch of a schedule on its own.

    Args:
        graph: ops and storages.
        steps: op indices in running order.
        costs: of each op.
        before: storages live at the start, counted until their last read here unless they are in `after`.
        after: storages that stay when the stretch has ended.
        uncounted: made here, but accounted for elsewhere.
        again: whether forward ops of the stretch run for a second time.

    Returns:
        Peak and time. Storages that are neither made here nor in `before` are not counted.
    """
    counted = set(before)
    ends: list[list[Storage]] = [[] for _ in steps]
    wanted = set(after)
    for position in range(len(steps) - 1, -1, -1):
        op = graph.ops[steps[position]]
        counted.update(storage for storage in op.writes if storage not in uncounted)
        for storage in op.reads:
            if storage not in wanted:
                wanted.add(storage)
                ends[position].append(storage)
        for storage in op.writes:
            if storage in wanted:
                wanted.discard(storage)
            else:
                ends[position].append(storage)
    live = peak = sum(storage.num_bytes for storage in before)
    time_ms = 0.0
    for position, index in enumerate(steps):
        op = graph.ops[index]
        cost = (costs.again if again and op.phase is Phase.FORWARD else costs.first)[index]
        ending = [storage for storage in ends[position] if storage in counted]
        written = sum(storage.num_bytes for storage in op.writes if storage in counted)
        taken = written if dying_operand(graph, op, ending) else 0
        live += written
        peak = max(peak, live - taken + cost.overhead_bytes)
        live -= sum(storage.num_bytes for storage in ending)
        time_ms += cost.time_ms
    return PartSimulation(peak_bytes=peak, time_ms=time_ms)


def state_bytes(op: Op) -> int:
    """Bytes that an op needs of its first run to run again, as its device's allocator counts them: a random state, or what it has found."""
    return CPU_STATE_BYTES if op.is_random and op.device.type == "cpu" else op.state_bytes
