"""The order of the backward: gradients of parameters as soon as they can be made.

Autograd takes the gradient of a layer's input first and that of its weight second, so that the layer's saved input, the gradient of
its output and the gradient of its input are in memory together. A gradient of a parameter leaves memory once it is made, and the
saved input may go with it: made first, the three never meet. No moment of the step then holds more than before.

Where branches meet, autograd's order says nothing of memory: it takes the branches in the reverse of the order in which they ran. The
search may take them in another (`roomier_backward`), which schedules hold and the graph does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from rockmate.capture import RoleKind
from rockmate.costs import Costs
from rockmate.graph import Graph, Op, Phase, Storage
from rockmate.schedule import no_recomputation, with_nothing_again
from rockmate.simulate import simulate

_LOWER = 0.99  # of a peak, at most which another counts as lower


def weight_gradients_first(graph: Graph, *, but: Collection[Op] = ()) -> Graph:
    """The graph with the backward ops that serve only gradients of parameters, those in `but` aside, as early as what they read allows.

    Contributions to one parameter keep their order, so that their sum is rounded the same.
    """
    pinned: set[Op] = set(but)
    while True:
        order = _early(graph, _serving_one_parameter(graph) - pinned)
        swapped = _swapped(graph, order) - pinned
        if not swapped:
            break
        pinned |= swapped
    for index, op in enumerate(order):
        op.index = index
    ordered = replace(graph, ops=tuple(order))
    ordered.verify()
    return ordered


def _serving_one_parameter(graph: Graph) -> set[Op]:
    """Backward ops whose result is a gradient of a parameter and nothing else, and those that nothing reads but one of them."""
    returned = {
        graph.storage_of[node]
        for node, role in graph.outputs
        if role.kind is not RoleKind.PARAMETER_GRADIENT
    }
    gradients = {
        graph.storage_of[node]
        for node, role in graph.outputs
        if role.kind is RoleKind.PARAMETER_GRADIENT
    }
    serving: set[Op] = set()
    for op in reversed(graph.ops):
        if op.phase is not Phase.BACKWARD or op.is_random or not returned.isdisjoint(op.writes):
            continue
        readers = {reader for storage in op.writes for reader in graph.readers.get(storage, ())}
        if (not readers and not gradients.isdisjoint(op.writes)) or (
            len(readers) == 1 and serving.issuperset(readers)
        ):
            serving.add(op)
    return serving


def _early(graph: Graph, moving: Collection[Op]) -> list[Op]:
    """The ops in order, each of `moving` right behind the last op of the backward that makes what it reads, or at its beginning."""
    order: dict[Op, None] = {}
    first = next((op for op in graph.ops if op.phase is Phase.BACKWARD), None)
    for op in graph.ops:
        if op in order:
            continue
        pending = [op]
        if op is first:
            pending = [
                other
                for other in graph.ops
                if other in moving and other is not op and _is_ready(other, order)
            ] + pending
        elif op in moving and not _is_ready(op, order):
            continue
        while pending:
            placed = pending.pop(0)
            order[placed] = None
            if placed.phase is Phase.FORWARD:  # nothing of the backward begins before its time
                continue
            readers = {
                reader: None
                for storage in placed.writes
                for reader in graph.readers.get(storage, ())
            }
            pending += [
                reader
                for reader in readers
                if reader in moving and reader not in pending and _is_ready(reader, order)
            ]
    assert len(order) == len(graph.ops), "an op was left behind"
    return list(order)


def _is_ready(op: Op, placed: Collection[Op]) -> bool:
    return all(storage.producer is None or storage.producer in placed for storage in op.reads)


def _swapped(graph: Graph, order: Sequence[Op]) -> set[Op]:
    """The ops that make gradients of a parameter whose contributions `order` takes in another order than the graph."""
    parameters = {
        role.name: graph.storage_of[node]
        for node, role in graph.inputs
        if role.kind is RoleKind.PARAMETER
    }
    contributions: dict[Storage, set[Op]] = {}
    for node, role in graph.outputs:
        producer = graph.storage_of[node].producer
        if role.kind is RoleKind.PARAMETER_GRADIENT and producer is not None:
            contributions.setdefault(parameters[role.name], set()).add(producer)
    place = {op: index for index, op in enumerate(order)}
    swapped: set[Op] = set()
    for ops in contributions.values():
        if sorted(ops, key=place.__getitem__) != sorted(ops, key=lambda op: op.index):
            swapped |= ops
    return swapped


def roomier_backward(graph: Graph, costs: Costs) -> tuple[Op, ...] | None:
    """Late and backward ops in an order with which the peak of the step with nothing recomputed is lower; None if the graph's is as good.

    Where the peak stays, the order hardly matters to plans, for better or worse.
    """
    order = _least_in_memory_first(graph)
    known, found = (
        simulate(graph, schedule, costs)
        for schedule in (no_recomputation(graph), with_nothing_again(graph, order))
    )
    return order if found.peak_bytes <= _LOWER * known.peak_bytes else None


def _least_in_memory_first(graph: Graph) -> tuple[Op, ...]:
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
                *(parameters[role.name] for _, role in op.delivers),
                *([None] if op.is_random else []),
            }
            for one in touched & of_one.keys():
                of_one[one].append(op)
    return [pair for ops in of_one.values() for pair in pairwise(ops)]
