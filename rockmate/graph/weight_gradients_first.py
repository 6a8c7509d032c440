"""Moves weight gradients to the front of the backward, as far as what they read allows.

Autograd's order computes a layer's input gradient before its weight gradient, so the upstream
gradient and the layer's input are live for longer than needed. In this order the weight gradient
comes first, goes to the gradient sink, and is released.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rockmate.capture.roles import RoleKind
from rockmate.graph.hooked_gradients import hooked_producers
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.graph.pass_options import PassOptions


def weight_gradients_first(graph: Graph, options: PassOptions) -> Graph:
    """The graph with each weight-gradient op right behind the last op that it waits for.

    Contributions to one parameter keep their order, so their sum rounds the same. Gradients of
    hooked parameters stay. The ops' `index` changes in place.
    """
    pinned = {producer for _, producer in hooked_producers(graph, options)}
    while True:
        order = _earliest_order(graph, _weight_gradient_ops(graph) - pinned)
        swapped = _swapped_contributions(graph, order) - pinned
        if not swapped:
            return graph.with_order(order)
        pinned |= swapped


def _weight_gradient_ops(graph: Graph) -> set[Op]:
    """Backward ops that serve one parameter's gradient only.

    Their result is such a gradient, or has one reader, which is such an op itself.
    """
    gradients, others = set[Storage](), set[Storage]()
    for node, role in graph.outputs:
        is_gradient = role.kind is RoleKind.PARAMETER_GRADIENT
        (gradients if is_gradient else others).add(graph.storage_of[node])
    found: set[Op] = set()
    for op in reversed(graph.ops):
        is_returned = not others.isdisjoint(op.writes)
        if op.phase is not Phase.BACKWARD or op.is_random or is_returned:
            continue
        readers = _readers_of(graph, op)
        is_final = not readers and not gradients.isdisjoint(op.writes)
        if is_final or (len(readers) == 1 and found.issuperset(readers)):
            found.add(op)
    return found


def _earliest_order(graph: Graph, moving: Collection[Op]) -> list[Op]:
    """The ops, each of `moving` right behind the last backward op that makes what it reads.

    Those that read nothing of the backward stand at its beginning.
    """
    order: dict[Op, None] = {}
    first = next((op for op in graph.ops if op.phase is Phase.BACKWARD), None)
    for op in graph.ops:
        if op in order:
            continue
        pending = [op]
        if op is first:
            ready = (o for o in graph.ops if o in moving and o is not op and _is_ready(o, order))
            pending = [*ready, op]
        elif op in moving and not _is_ready(op, order):
            continue
        while pending:
            placed = pending.pop(0)
            order[placed] = None
            # No backward op moves into the forward.
            if placed.phase is Phase.FORWARD:
                continue
            pending += [
                reader
                for reader in _readers_of(graph, placed)
                if reader in moving and reader not in pending and _is_ready(reader, order)
            ]
    assert len(order) == len(graph.ops), "an op has no place"
    return list(order)


def _is_ready(op: Op, placed: Collection[Op]) -> bool:
    return all(storage.producer is None or storage.producer in placed for storage in op.reads)


def _readers_of(graph: Graph, op: Op) -> list[Op]:
    """The ops that read what an op makes, each once, by storage."""
    return list(
        dict.fromkeys(reader for storage in op.writes for reader in graph.readers.get(storage, ()))
    )


def _swapped_contributions(graph: Graph, order: Sequence[Op]) -> set[Op]:
    """The ops that contribute to a parameter's gradient in another order than in the graph."""
    contributions: dict[Storage, set[Op]] = {}
    for node, role in graph.outputs:
        producer = graph.storage_of[node].producer
        if role.kind is RoleKind.PARAMETER_GRADIENT and producer is not None:
            contributions.setdefault(graph.parameters[role.name], set()).add(producer)
    position = {op: index for index, op in enumerate(order)}
    swapped: set[Op] = set()
    for ops in contributions.values():
        if sorted(ops, key=position.__getitem__) != sorted(ops, key=lambda op: op.index):
            swapped |= ops
    return swapped
