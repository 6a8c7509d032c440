"""The move "defer": runs a weight-gradient op later, where memory is free.

A backward op whose result no op reads (the gradient of a parameter) may run at any later program
point, and one whose result waits for its first reader (a part of the gradient of a shared
parameter) at any before that. Its inputs then stay live until that point. Deferral lowers the
memory at the op's former position by its result and its workspace, and by the result from there on.

The free bytes are estimated: an input is assumed live until the later point whether or not it is
recomputed, and so is each final gradient at the last run of its op. The caller simulates the
result.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from rockmate._util import Ints, once_for_each
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Phase
from rockmate.ops.collectives import is_communication
from rockmate.schedule.liveness import op_def_use
from rockmate.schedule.schedule import Schedule, finish
from rockmate.schedule.simulate import Simulation


@once_for_each
def deferrable_ops(graph: Graph) -> frozenset[Op]:
    """The backward ops that may run later without a change of any number.

    They make the whole of each gradient that they accumulate. Of a step with collectives, they have
    no reader: a product that waits would leave a reduction without work to run beside. Three kinds
    of ops are excluded:

    * One of several contributions to a gradient: in another order, the sum is rounded differently.
      A sum that is an op of the graph has an order of its own.
    * An op that reads a parameter whose gradient another op makes. That parameter's hooks wait for
      its last read, and a later read would delay them and the whole gradient that they must see.
    * One with whose gradient hooks fire, if they do with others, too.
    """
    contributions = Counter(graph.parameters[role.name] for _, role in graph.initial_gradients)
    contributions.update(
        graph.parameters[role.name] for op in graph.ops for _, role in op.final_gradients
    )
    is_sharded = any(is_communication(op.node.target) for op in graph.ops)
    return frozenset(
        op
        for op in graph.ops
        if op.phase is Phase.BACKWARD
        and not (op.is_random or op.keeps_order)
        and not (is_sharded and any(graph.readers.get(storage) for storage in op.writes))
        and all(contributions[graph.parameters[role.name]] == 1 for _, role in op.final_gradients)
        and (contributions.keys() & op.reads)
        <= {graph.parameters[role.name] for _, role in op.final_gradients}
    )


def result_and_workspace_bytes(graph: Graph, costs: Costs) -> Ints:
    """The bytes that the first run of each op takes beside its inputs, by `Op.index`."""
    return op_def_use(graph).written_bytes + costs.first_arrays.overhead_bytes


def insertion_points(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    simulation: Simulation,
    readers: FirstReaders,
    position: int,
    budget_bytes: int,
) -> list[int]:
    """The positions before which the run at `position` could stand within the budget.

    Returns:
        The point with the most free memory and the last one, which may coincide. None if nothing
        would be gained: the runs beside `position` need as much memory, and so do those up to the
        first that reads the result.
    """
    live_bytes = np.array(simulation.live_bytes, dtype=np.int64)
    end, waiting_bytes = int(readers.ends[position]), int(readers.waiting_bytes[position])
    changed = live_bytes + _extended_input_bytes(graph, schedule, position) - waiting_bytes
    in_use = changed[position + 1 : end]
    if not len(in_use):
        return []
    is_lower_after = bool(waiting_bytes) and bool((in_use < live_bytes[position + 1 : end]).any())
    if not is_lower_after and max(live_bytes[position - 1], in_use[0]) >= live_bytes[position]:
        return []
    own = result_and_workspace_bytes(graph, costs)
    steps = np.array(schedule.steps, dtype=np.int64)
    # Live bytes right before each run, the first reader among them.
    before = changed[position + 1 : end + 1] - own[steps[position + 1 : end + 1]]
    for place in schedule.in_place:
        if position < place <= end:
            before[place - position - 1] += graph.ops[schedule.steps[place]].writes[0].num_bytes
    before_next = before[1:] if end < len(steps) else np.append(before[1:], before[-1])
    has_room = np.logical_and.accumulate(in_use <= budget_bytes) & (
        before_next + own[steps[position]] <= budget_bytes
    )
    # Indices of later runs: the deferred run may stand behind each of them.
    behind = np.flatnonzero(has_room)
    if not len(behind):
        return []
    roomiest = int(behind[before_next[behind].argmin()])
    return [position + 2 + place for place in dict.fromkeys((roomiest, int(behind[-1])))]


class FirstReaders(NamedTuple):
    """Where the results of each run are read first.

    Attributes:
        ends: position of the first later run that reads one; without a reader the schedule's end.
        waiting_bytes: of the results that some run reads.
    """

    ends: Ints
    waiting_bytes: Ints


def first_readers(graph: Graph, schedule: Schedule) -> FirstReaders:
    """The first readers of the results of each run of a schedule."""
    def_use, ops = schedule.def_use, op_def_use(graph)
    assert def_use is not None
    ends = np.full(len(schedule.steps), len(schedule.steps), dtype=np.int64)
    waiting_bytes = np.zeros(len(schedule.steps), dtype=np.int64)
    made = np.flatnonzero(def_use.is_definition & ~def_use.is_last)
    np.minimum.at(ends, def_use.position[made], def_use.position[made + 1])
    np.add.at(waiting_bytes, def_use.position[made], ops.num_bytes[def_use.storage[made]])
    return FirstReaders(ends, waiting_bytes)


def _extended_input_bytes(graph: Graph, schedule: Schedule, position: int) -> Ints:
    """At each run, the bytes of inputs of the run at `position` that are released by then."""
    def_use, ops = schedule.def_use, op_def_use(graph)
    assert def_use is not None
    reads = np.flatnonzero(
        (def_use.position == position) & ~def_use.is_definition & ~ops.is_held[def_use.storage]
    )
    lasts = np.flatnonzero(def_use.is_last)
    ends = def_use.position[lasts[np.searchsorted(lasts, reads)]]
    extended = np.zeros(len(schedule.steps), dtype=np.int64)
    for end, storage in zip(ends.tolist(), def_use.storage[reads].tolist(), strict=True):
        is_reused_in_place = end in schedule.in_place and end > position
        extended[end if is_reused_in_place else end + 1 :] += ops.num_bytes[storage]
    return extended


def defer(graph: Graph, schedule: Schedule, position: int, place: int) -> Schedule:
    """The schedule with the backward run at `position` moved to right before the later `place`."""
    steps, num_forward = schedule.steps, len(schedule.forward)
    backward = [
        *steps[num_forward:position],
        *steps[position + 1 : place],
        steps[position],
        *steps[place:],
    ]
    return finish(graph, schedule.forward, backward)
