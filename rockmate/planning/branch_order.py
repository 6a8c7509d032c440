"""The order of the backward: gradients of parameters as soon as they can be made.

Autograd takes the gradient of a layer's input first and that of its weight second, so that the layer's saved input, the gradient of
its output and the gradient of its input are in memory together. A gradient of a parameter leaves memory once it is made, and the
saved input may go with it: made first, the three never meet. No moment of the step then holds more than before.

Where branches meet, autograd's order says nothing of memory: it takes the branches in the reverse of the order in which they ran. The
search may take them in another (`memory_minimizing_order`), which schedules hold and the graph does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import pairwise

from rockmate.capture.roles import RoleKind
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

_LOWER = 0.99  # of a peak, at most which another counts as lower


def memory_minimizing_order(graph: Graph, costs: Costs) -> tuple[Op, ...] | None:
    """Late and backward ops in an order with which the peak of the step with nothing recomputed is lower; None if the graph's is as good.

    Where the peak stays, the order hardly matters to plans, for better or worse.
    """
    order = _greedy_min_live(graph)
    known, found = (
        simulate(graph, schedule, costs)
        for schedule in (baseline_schedule(graph), baseline_schedule(graph, order))
    )
    return order if found.peak_bytes <= _LOWER * known.peak_bytes else None


def _greedy_min_live(graph: Graph) -> tuple[Op, ...]:
    """Late and backward ops: of those that can run, the one that leaves least in memory comes next, late ops right before they are read.

    All that the forward makes is taken to be in memory until its last read.
    """
    behind = _kept_in_order(graph)
    num_awaited = {op: len(_awaited(op)) for op in graph.backward_ops if op.phase is Phase.BACKWARD}
    followers: dict[Op, list[Op]] = defaultdict(list)
    for op in num_awaited:
        for other in _awaited(op):
            followers[other].append(op)
    for earlier, later in behind:
        num_awaited[later] += 1
        followers[earlier].append(later)
    num_reads = {
        storage: sum(op.phase is not Phase.FORWARD for op in ops)
        for storage, ops in graph.readers.items()
    }
    ready = [op for op, number in num_awaited.items() if not number]
    order: dict[Op, None] = {}
    while ready:
        op = min(ready, key=lambda op: (_growth(graph, op, num_reads), op.index))
        ready.remove(op)
        for placed in (*_late_before(op, order), op):
            order[placed] = None
            for storage in placed.reads:
                num_reads[storage] -= 1
        for follower in followers[op]:
            num_awaited[follower] -= 1
            if not num_awaited[follower]:
                ready.append(follower)
    order.update(dict.fromkeys(graph.backward_ops))  # late ops that only the user or nobody reads
    return tuple(order)


def _awaited(op: Op) -> set[Op]:
    """The backward ops that make what `op` reads; late ops wait for none."""
    makers = {storage.producer for storage in op.reads if storage.producer is not None}
    return {maker for maker in makers if maker.phase is Phase.BACKWARD}


def _late_before(op: Op, placed: Collection[Op]) -> list[Op]:
    """The late ops that have to run before `op`, `placed` aside, in order."""
    found: set[Op] = set()
    pending = [op]
    while pending:
        makers = {
            storage.producer for storage in pending.pop().reads if storage.producer is not None
        }
        new = [
            maker
            for maker in makers
            if maker.phase is Phase.LATE and maker not in placed and maker not in found
        ]
        found.update(new)
        pending += new
    return sorted(found, key=lambda late: late.index)


def _growth(graph: Graph, op: Op, num_reads: dict[Storage, int]) -> int:
    """Bytes by which what is in memory grows as `op` runs, where so many reads are left of each storage."""
    made = sum(
        storage.num_bytes
        for storage in op.writes
        if num_reads.get(storage) or storage.is_kept_to_end
    )
    return made - sum(
        storage.num_bytes
        for storage in op.reads
        if num_reads[storage] == 1 and storage not in graph.held
    )


def _kept_in_order(graph: Graph) -> list[tuple[Op, Op]]:
    """Pairs of backward ops that stay in the graph's order: those that draw, and those that read one parameter or make of its gradient.

    The sum of contributions is rounded as before, and hooks of the parameter see what they saw.
    """
    parameters = {
        role.name: graph.storage_of[node]
        for node, role in graph.inputs
        if role.kind is RoleKind.PARAMETER
    }
    of_one: dict[Storage | None, list[Op]] = {
        storage: [] for storage in (None, *parameters.values())
    }
    for op in graph.backward_ops:
        if op.phase is Phase.BACKWARD:
            touched = {
                *op.reads,
                *(parameters[role.name] for _, role in op.final_gradients),
                *([None] if op.is_random else []),
            }
            for one in touched & of_one.keys():
                of_one[one].append(op)
    return [pair for ops in of_one.values() for pair in pairwise(ops)]
