"""A step with some values free of charge: the search for what to recompute where these move."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rockmate.graph.ir import Graph, Op, Storage


def with_free_values(graph: Graph, free: Collection[int]) -> Graph:
    """A copy of a graph in which some storages take no bytes.

    Its nodes are those of `graph`, and ops and storages have the same indices, so that a schedule
    of one is a schedule of the other.

    Args:
        graph: the step.
        free: indices of the storages.
    """
    copies = {
        storage: replace(
            storage, num_bytes=0 if storage.index in free else storage.num_bytes, producer=None
        )
        for storage in graph.storages
    }
    ops = tuple(_copied(op, copies) for op in graph.ops)
    return replace(
        graph,
        ops=ops,
        storages=tuple(copies[storage] for storage in graph.storages),
        storage_of={node: copies[storage] for node, storage in graph.storage_of.items()},
    )


def _copied(op: Op, copies: dict[Storage, Storage]) -> Op:
    copy = replace(
        op,
        reads=tuple(copies[storage] for storage in op.reads),
        writes=tuple(copies[storage] for storage in op.writes),
        final_gradients=list(op.final_gradients),
        in_place_operands=None,
    )
    for storage in copy.writes:
        storage.producer = copy
    return copy
