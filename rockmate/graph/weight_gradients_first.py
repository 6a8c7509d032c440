"""TODO: graph.weight_gradients_first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rockmate.capture.roles import RoleKind
from rockmate.graph.ir import Graph, Op, Phase, Storage


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
