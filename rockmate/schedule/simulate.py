"""Replays a schedule on storage sizes: live bytes at every run, the peak and where it is.

This is the measure by which plans are compared and the figure that is held against the allocator. It knows nothing of blocks,
options or solvers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rockmate._arrays import Ints
from rockmate.costs.cost import Costs
from rockmate.graph.in_place import reusable_operand
from rockmate.graph.ir import Graph, Phase, Storage
from rockmate.schedule.liveness import DefUse, op_def_use
from rockmate.schedule.schedule import Schedule


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
    num_forward = len(schedule.forward)
    def_use = schedule.def_use or DefUse.of(graph, schedule.forward, schedule.backward)
    ops, steps = op_def_use(graph), def_use.steps
    if not len(steps):
        return Simulation(peak_bytes=0, peak_position=0, time_ms=0.0, live_bytes=(), saved_bytes=0)
    made_bytes = ops.written_bytes[steps]
    freed_bytes = np.zeros(len(steps), dtype=np.int64)
    positions, storages = def_use.released(graph)
    np.add.at(freed_bytes, positions, ops.num_bytes[storages])
    if schedule.backward:
        made_bytes[num_forward] += ops.tangent_bytes
    _add_states(graph, def_use, made_bytes, freed_bytes)
    after = np.cumsum(made_bytes - freed_bytes)
    running = (
        after
        + freed_bytes
        + np.where(
            def_use.is_first,
            costs.first_arrays.overhead_bytes[steps],
            costs.recompute_arrays.overhead_bytes[steps],
        )
    )
    in_place = list(schedule.in_place)
    running[in_place] -= ops.written_bytes[steps[in_place]]
    peak_position = int(running.argmax())
    return Simulation(
        peak_bytes=int(running[peak_position]),
        peak_position=peak_position,
        time_ms=float(
            np.cumsum(
                np.where(
                    def_use.is_first,
                    costs.first_arrays.time_ms[steps],
                    costs.recompute_arrays.time_ms[steps],
                )
            )[-1]
        ),
        live_bytes=tuple(running.tolist()),
        saved_bytes=int(after[num_forward - 1]) if num_forward else 0,
    )


def _add_states(graph: Graph, def_use: DefUse, made_bytes: Ints, freed_bytes: Ints) -> None:
    """Adds what each op needs of its first run to run again, which is kept from that to its last."""
    steps, state_bytes = def_use.steps, op_def_use(graph).state_bytes
    runs = np.flatnonzero(state_bytes[steps])
    last = {int(steps[position]): position for position in runs.tolist()}
    for position in runs[def_use.is_first[runs]].tolist():
        index = int(steps[position])
        if last[index] != position:
            made_bytes[position] += state_bytes[index]
            freed_bytes[last[index]] += state_bytes[index]


def simulate_part(
    graph: Graph,
    steps: Sequence[int],
    costs: Costs,
    *,
    before: Collection[Storage],
    after: Collection[Storage],
    uncounted: Collection[Storage] = (),
    recompute: bool = False,
) -> PartSimulation:
    """Replays a stretch of a schedule on its own.

    Args:
        graph: ops and storages.
        steps: op indices in running order.
        costs: of each op.
        before: storages live at the start, counted until their last read here unless they are in `after`.
        after: storages that stay when the stretch has ended.
        uncounted: made here, but accounted for elsewhere.
        recompute: whether forward ops of the stretch run for a second time.

    Returns:
        Peak and time. Storages that are neither made here nor in `before` are not counted.
    """
    ops = [graph.ops[index] for index in steps]
    made = {storage for op in ops for storage in op.writes}
    counted = made.difference(uncounted).union(before)
    ends: list[list[Storage]] = [[] for _ in steps]
    wanted = set(after)
    for op, ending in zip(reversed(ops), reversed(ends), strict=True):
        for storage in op.reads:
            if storage in counted and storage not in wanted:
                wanted.add(storage)
                ending.append(storage)
        for storage in op.writes:
            if storage in wanted:
                wanted.discard(storage)
            elif storage in counted:
                ending.append(storage)
    live = peak = sum(storage.num_bytes for storage in before)
    time_ms = 0.0
    for op, ending in zip(ops, ends, strict=True):
        cost = (costs.recompute if recompute and op.phase is Phase.FORWARD else costs.first)[
            op.index
        ]
        written = sum([storage.num_bytes for storage in op.writes if storage in counted])
        taken = written if ending and reusable_operand(graph, op, ending) else 0
        live += written
        peak = max(peak, live - taken + cost.overhead_bytes)
        live -= sum([storage.num_bytes for storage in ending])
        time_ms += cost.time_ms
    return PartSimulation(peak_bytes=peak, time_ms=time_ms)
