"""Simulation: live bytes at every run of a schedule, its peak, and its time.

Plans are compared by these figures, and the peak is what a measurement on the allocator must not
exceed. A run counts the live values, its result, its workspace, and the states that recomputations
replay; a run in place counts one memory for its operand and its result. Static storages and
gradients at rest in `.grad` are not counted. With several forwards in flight, a step's own bytes
stand beside the saved values of all others. If a recomputed op makes a result of the step as well,
its second copy counts to the end, which is an upper bound.

The simulator reads the op and storage tables of `schedule.liveness` and the costs. It knows no
blocks, options or solvers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rockmate._util import Ints
from rockmate.costs.cost import Costs
from rockmate.graph.in_place import reusable_operand
from rockmate.graph.ir import Graph, Phase, Storage
from rockmate.schedule.lanes import LaneReplay, replay
from rockmate.schedule.liveness import DefUse, op_def_use
from rockmate.schedule.move import plan_slots
from rockmate.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Memory and time of a schedule.

    Attributes:
        peak_bytes: largest entry of `live_bytes`.
        peak_position: position of the first run that reaches it, in `Schedule.steps`.
        time_ms: sum of the costs of all runs; with moves, the time of their replay in lanes.
        live_bytes: for each run the bytes of live values, states and workspace while it runs, and
            the saved bytes of the other forwards in flight.
        saved_bytes: bytes live when the forward has ended, outputs included; those of one forward.
        host_bytes: bytes that moved values take in the other tier, of all forwards in flight.
        lanes: when the step waits for moves; None without moves.
    """

    peak_bytes: int
    peak_position: int
    time_ms: float
    live_bytes: tuple[int, ...]
    saved_bytes: int
    host_bytes: int = 0
    lanes: LaneReplay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSimulation:
    """Memory and time of a stretch of a schedule.

    Attributes:
        peak_bytes: largest sum of counted live values and workspace.
        time_ms: sum of the costs of its runs.
    """

    peak_bytes: int
    time_ms: float


def simulate(graph: Graph, schedule: Schedule, costs: Costs) -> Simulation:
    """Memory and time of a schedule of `graph`."""
    def_use = schedule.def_use or DefUse.of(op_def_use(graph), *schedule.order)
    return simulate_def_use(def_use, schedule, costs)


def simulate_def_use(def_use: DefUse, schedule: Schedule, costs: Costs) -> Simulation:
    """Memory and time of a schedule whose definitions and uses are known; needs no graph."""
    ops, steps, num_forward = def_use.ops, def_use.steps, len(schedule.forward)
    if not len(steps):
        return Simulation(peak_bytes=0, peak_position=0, time_ms=0.0, live_bytes=(), saved_bytes=0)
    is_first, first, other = def_use.is_first, costs.first_arrays, costs.recompute_arrays
    overhead_bytes = np.where(is_first, first.overhead_bytes[steps], other.overhead_bytes[steps])
    time_ms = np.where(is_first, first.time_ms[steps], other.time_ms[steps])
    copied_bytes = [int(ops.num_bytes[each.storage]) for each in schedule.copies]
    # For each position the bytes that come back right before its run.
    fetched_bytes = np.zeros(len(steps), dtype=np.int64)
    for each, num_bytes in zip(schedule.copies, copied_bytes, strict=True):
        fetched_bytes[each.fetch] += num_bytes
    made_bytes = ops.written_bytes[steps] + fetched_bytes
    freed_bytes = np.zeros(len(steps), dtype=np.int64)
    for each in schedule.fetches:
        freed_bytes[each.last] += ops.num_bytes[each.storage]
    positions, storages = def_use.released()
    np.add.at(freed_bytes, positions, ops.num_bytes[storages])
    if schedule.backward:
        made_bytes[num_forward] += ops.tangent_bytes
    _add_states(def_use, made_bytes, freed_bytes)
    after = np.cumsum(made_bytes - freed_bytes)
    running = after + freed_bytes + overhead_bytes
    in_place = list(schedule.in_place)
    running[in_place] -= ops.reusing_bytes[steps[in_place]]
    if schedule.copies:
        # What comes back before a run is there although the run may need less than nothing.
        before = after + freed_bytes - ops.written_bytes[steps]
        running = np.where(fetched_bytes > 0, np.maximum(running, before), running)
    saved_bytes = int(after[num_forward - 1]) if num_forward else 0
    # While this step runs, the other forwards in flight have ended and their backwards not begun.
    running += (ops.num_in_flight - 1) * saved_bytes
    peak_position = int(running.argmax())
    lanes = None
    if schedule.copies:
        assert costs.link is not None, "a schedule with moves needs the rates of a link"
        lanes = replay(time_ms.tolist(), schedule.copies, copied_bytes, costs.link)
    slots = plan_slots(schedule.moves, copied_bytes[: len(schedule.moves)])
    return Simulation(
        peak_bytes=int(running[peak_position]),
        peak_position=peak_position,
        time_ms=float(np.cumsum(time_ms)[-1]) if lanes is None else lanes.time_ms,
        live_bytes=tuple(running.tolist()),
        saved_bytes=saved_bytes,
        host_bytes=ops.num_in_flight * slots.num_bytes,
        lanes=lanes,
    )


def _add_states(def_use: DefUse, made_bytes: Ints, freed_bytes: Ints) -> None:
    """Adds the state of each recomputed op, which is live from its first run to its last."""
    steps, state_bytes = def_use.steps, def_use.ops.state_bytes
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
    """Memory and time of a stretch of a schedule, without the rest of it.

    Values enter and leave a stretch, tangents among them, which `DefUse` does not know. So the last
    reads come from a backward scan of its own. On a whole forward or backward it agrees with
    `simulate`, but for the states that recomputations replay: those are not counted here.

    Args:
        graph: ops and storages.
        steps: op indices in running order.
        costs: costs of the ops.
        before: storages live at the start; each counts to its last read here, and to the end of the
            stretch if it is in `after` or not read.
        after: storages still live when the stretch has ended.
        uncounted: storages made here that are accounted for elsewhere.
        recompute: whether the forward ops of the stretch are recomputations.

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
        table = costs.recompute if recompute and op.phase is Phase.FORWARD else costs.first
        cost = table[op.index]
        written = sum([storage.num_bytes for storage in op.writes if storage in counted])
        is_in_place = op.writes[0] in counted and ending and reusable_operand(graph, op, ending)
        taken = op.writes[0].num_bytes if is_in_place else 0
        live += written
        peak = max(peak, live - taken + cost.overhead_bytes)
        live -= sum([storage.num_bytes for storage in ending])
        time_ms += cost.time_ms
    return PartSimulation(peak_bytes=peak, time_ms=time_ms)
