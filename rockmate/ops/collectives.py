"""Collectives of a captured graph: each waits for its result.

A trace has two calls for a collective, one that issues it and one that waits. In a plan they are
one op, so that no schedule stands between them: its result is a value like any other, released
after its last reader, and recomputed by all ranks or by none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate._torch.distributed import is_collective, is_wait, ranks_of, wait_for
from rockmate.errors import UnsupportedModelError
from rockmate.ops.shards import GATHER, ON_SHARDS


def collective(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs a functional collective, whose last argument names the group; waits for its result."""
    return wait_for(op(*args, **kwargs))


def groups_of(node: fx.Node) -> list[str]:
    """The names of the process groups of a collective, by which ops know them."""
    if node.target in ON_SHARDS:
        names: list[Any] = [*filter(None, node.args[5:])]
    else:
        names = [node.kwargs.get("group_name", node.args[-1])]
    assert all(isinstance(name, str) for name in names)
    return names


def is_communication(target: Any) -> bool:
    """Whether all ranks of a group must make a call of this target."""
    return target is collective or target in ON_SHARDS


def wait_for_collectives(graph: fx.Graph) -> None:
    """Makes one call of each collective and what waits for it, in place.

    Each notes the ranks of its groups, since a cost model may have none of these later.

    Raises:
        UnsupportedModelError: a collective returns several tensors.
    """
    _gather_late(graph)
    for node in list(graph.nodes):
        if node.target in ON_SHARDS:
            if node.target is GATHER:
                node.args = (*node.args[:6], None, "")  # its gradient has an op of its own
            _note_ranks(node)
            continue
        if not is_collective(node.target):
            continue
        waits = [user for user in node.users if is_wait(user.target)]
        if not isinstance(node.meta["val"], torch.Tensor) or len(waits) != 1:
            msg = (
                f"{node.target} returns several tensors at once, or is waited for {len(waits)} "
                "times, which cannot be planned."
            )
            raise UnsupportedModelError(msg)
        # Code may wait for what a trace has waited for already.
        while len(waits[-1].users) == 1 and is_wait(next(iter(waits[-1].users)).target):
            waits += waits[-1].users
        with graph.inserting_before(node):
            merged = graph.call_function(collective, (node.target, *node.args), dict(node.kwargs))
        # What views the result lies in the memory of this fake value.
        merged.meta.update({**node.meta, "val": waits[-1].meta["val"]})
        _note_ranks(merged)
        waits[-1].replace_all_uses_with(merged)
        for each in (*reversed(waits), node):
            graph.erase_node(each)


def _gather_late(graph: fx.Graph) -> None:
    """Puts each gather in front of its first reader: a trace has it ahead of a whole unit."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not GATHER:
            continue
        items = sorted(node.users, key=place.__getitem__)
        readers = [reader for item in items for reader in item.users]
        if not readers:
            continue
        first = min(readers, key=place.__getitem__)
        for moved in (node, *items):
            first.prepend(moved)
            moved.meta["module"] = first.meta.get("module", "")


def _note_ranks(node: fx.Node) -> None:
    node.meta["ranks"] = tuple(tuple(ranks_of(name)) for name in groups_of(node))
