"""An order of the backward that lowers the peak where branches meet.

Autograd runs the backward of parallel branches in the reverse of their forward order, whatever
memory that takes. The search may choose another order, which a schedule holds and the graph does
not. A greedy list scheduling: of the ready ops, the one that leaves the fewest live bytes runs
next. It is a heuristic. The problem itself is NP-hard (register sufficiency).
"""

from __future__ import annotations

from collections.abc import Collection
from graphlib import TopologicalSorter
from itertools import pairwise

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

# Largest ratio of an order's baseline peak to that of the graph's order to be used.
_MAX_PEAK_RATIO = 0.99


def memory_minimizing_order(graph: Graph, costs: Costs) -> tuple[Op, ...] | None:
    """Late and backward ops in an order that lowers the baseline's peak; None if none is found.

    An order that does not lower the baseline's peak hardly changes plans.
    """
    order = _greedy_min_live(graph)
    own, found = (
        simulate(graph, schedule, costs)
        for schedule in (baseline_schedule(graph), baseline_schedule(graph, order))
    )
    return order if found.peak_bytes <= _MAX_PEAK_RATIO * own.peak_bytes else None


def _greedy_min_live(graph: Graph) -> tuple[Op, ...]:
    """Late and backward ops, greedily: the ready op that leaves the fewest live bytes is next.

    A late op runs right before its first reader. All values of the forward are assumed live until
    their last read.
    """
    backward = [op for op in graph.backward_ops if op.phase is Phase.BACKWARD]
    sorter = TopologicalSorter({op: _awaited(op) for op in backward})
    for earlier, later in _fixed_pairs(graph):
        sorter.add(later, earlier)
    sorter.prepare()
    num_reads = {
        storage: sum(op.phase is not Phase.FORWARD for op in ops)
        for storage, ops in graph.readers.items()
    }
    ready: list[Op] = []
    order: dict[Op, None] = {}
    while sorter.is_active():
        ready += sorter.get_ready()
        op = min(ready, key=lambda op: (_growth(graph, op, num_reads), op.index))
        ready.remove(op)
        for placed in (*_late_before(op, order), op):
            order[placed] = None
            for storage in placed.reads:
                num_reads[storage] -= 1
        sorter.done(op)
    # What remains are late ops that no backward op reads.
    order.update(dict.fromkeys(graph.backward_ops))
    return tuple(order)


def _awaited(op: Op) -> set[Op]:
    """The backward ops whose results `op` reads."""
    return {s.producer for s in op.reads if s.producer and s.phase is Phase.BACKWARD}


def _late_before(op: Op, placed: Collection[Op]) -> list[Op]:
    """The late ops that `op` needs and that are not yet placed, in order."""
    found: set[Op] = set()
    pending = [op]
    while pending:
        makers = {each.producer for each in pending.pop().reads if each.producer is not None}
        new = [
            maker
            for maker in makers
            if maker.phase is Phase.LATE and maker not in placed and maker not in found
        ]
        found.update(new)
        pending += new
    return sorted(found, key=lambda late: late.index)


def _growth(graph: Graph, op: Op, num_reads: dict[Storage, int]) -> int:
    """The growth of live bytes as `op` runs, given the number of reads left of each storage."""
    made = sum(
        storage.num_bytes
        for storage in op.writes
        if num_reads.get(storage) or storage.is_kept_to_end
    )
    return made - sum(
        storage.num_bytes
        for storage in op.reads
        if num_reads[storage] == 1 and storage not in graph.externally_held
    )


def _fixed_pairs(graph: Graph) -> list[tuple[Op, Op]]:
    """Pairs of backward ops that keep the graph's order, so that no number changes.

    These are neighbours among random ops, among those with whose gradients hooks fire, and among
    the ops that read one parameter or contribute to its gradient. A sum of contributions is then
    rounded as in eager mode, and the parameter's hooks see the same values.
    """
    of_one: dict[Storage | None, list[Op]] = {
        storage: [] for storage in (None, *graph.parameters.values())
    }
    for op in graph.backward_ops:
        if op.phase is Phase.BACKWARD:
            touched = {
                *op.reads,
                *(graph.parameters[role.name] for _, role in op.final_gradients),
                *([None] if op.is_random else []),
            }
            for one in touched & of_one.keys():
                of_one[one].append(op)
    hooked = [op for op in graph.backward_ops if op.keeps_order]
    return [pair for ops in (*of_one.values(), hooked) for pair in pairwise(ops)]
