"""Gradients of parameters put off to where there is room for what their ops take.

`rockmate/backward_order.py` has them made as soon as they can be, which releases what they read and is best where that is large. Where
the gradient itself and its op's workspace are larger than what it reads, as of a convolution of many channels on a small image, the
moment at which it is made may be what a schedule recomputes for. Nothing waits for such a run, and what it reads can be kept in little
memory until there is room.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from rockmate.accesses import Ints
from rockmate.capture import RoleKind
from rockmate.costs import Costs
from rockmate.graph import Graph, Op, Phase
from rockmate.schedule import Schedule, finish
from rockmate.simulate import Simulation


def can_wait(graph: Graph) -> frozenset[Op]:
    """Backward ops whose results nothing reads, and which make all of each gradient that they hand over.

    One of several contributions to a gradient stays where it is: in another order their sum is rounded differently. So does what reads a
    parameter that another op makes the gradient of: the hooks of that parameter wait for its last read, and what they must see whole with
    them.
    """
    parameters = {
        role.name: graph.storage_of[node]
        for node, role in graph.inputs
        if role.kind is RoleKind.PARAMETER
    }
    contributions = Counter(parameters[role.name] for _, role in graph.initial_deliveries)
    contributions.update(parameters[role.name] for op in graph.ops for _, role in op.delivers)
    return frozenset(
        op
        for op in graph.ops
        if op.phase is Phase.BACKWARD
        and not op.is_random
        and not any(graph.readers.get(storage) for storage in op.writes)
        and all(contributions[parameters[role.name]] == 1 for _, role in op.delivers)
        and (contributions.keys() & op.reads) <= {parameters[role.name] for _, role in op.delivers}
    )


def own_bytes(graph: Graph, costs: Costs) -> Ints:
    """What the first run of each op takes beside what it reads."""
    return graph.op_accesses.written_bytes + costs.first_table[1]


def places_with_room(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    simulation: Simulation,
    position: int,
    budget_bytes: int,
) -> list[int]:
    """Positions right before which the run at `position` could stand within the budget: the one of most room, and the last.

    None where the runs beside it need as much, so that nothing is gained. An estimate: what the run reads is taken to stay until then,
    made anew or not, and bytes at the end of the step to be those at its last run.
    """
    live_bytes = np.array(simulation.live_bytes, dtype=np.int64)
    in_use = (live_bytes + _staying_bytes(graph, schedule, position))[position + 1 :]
    if not len(in_use) or max(live_bytes[position - 1], in_use[0]) >= live_bytes[position]:
        return []
    own = own_bytes(graph, costs)
    steps = np.array(schedule.steps, dtype=np.int64)
    before = in_use - own[steps[position + 1 :]]
    for place in schedule.in_place:
        if place > position:
            before[place - position - 1] += graph.ops[schedule.steps[place]].writes[0].num_bytes
    before_next = np.append(before[1:], before[-1])
    has_room = np.logical_and.accumulate(in_use <= budget_bytes) & (
        before_next + own[steps[position]] <= budget_bytes
    )
    behind = np.flatnonzero(has_room)  # of these runs
    if not len(behind):
        return []
    roomiest = int(behind[before_next[behind].argmin()])
    return [position + 2 + place for place in dict.fromkeys((roomiest, int(behind[-1])))]


def _staying_bytes(graph: Graph, schedule: Schedule, position: int) -> Ints:
    """Bytes at each run of what the run at `position` reads and would otherwise have been released by then."""
    accesses, ops = schedule.accesses, graph.op_accesses
    assert accesses is not None
    reads = np.flatnonzero(
        (accesses.position == position) & ~accesses.is_made & ~ops.is_held[accesses.storage]
    )
    lasts = np.flatnonzero(accesses.is_last)
    ends = accesses.position[lasts[np.searchsorted(lasts, reads)]]
    staying = np.zeros(len(schedule.steps), dtype=np.int64)
    for end, storage in zip(ends.tolist(), accesses.storage[reads].tolist(), strict=True):
        is_taken_over = end in schedule.in_place and end > position
        staying[end if is_taken_over else end + 1 :] += ops.num_bytes[storage]
    return staying


def put_off(graph: Graph, schedule: Schedule, position: int, place: int) -> Schedule:
    """The schedule with the run at `position`, of the backward, right before `place`, which is behind it."""
    steps, num_forward = schedule.steps, len(schedule.forward)
    return finish(
        graph,
        schedule.forward,
        [
            *steps[num_forward:position],
            *steps[position + 1 : place],
            steps[position],
            *steps[place:],
        ],
    )
