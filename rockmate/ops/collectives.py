"""A collective that returns when its result is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate._torch.distributed import wait_for
from rockmate.ops.shards import ON_SHARDS, REDUCE


def collective(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs a functional collective and waits for its result.

    Args:
        op: the overload that issues it.
        *args: its arguments; the last names the process group.
        **kwargs: its keywords.
    """
    return wait_for(op(*args, **kwargs))


def collective_texts(node: fx.Node) -> list[tuple[str, str]]:
    """Collectives as text that is equal on all ranks that may meet in them, each with its group.

    A reduction of a replicated shard is two: over the ranks that share the whole, and over those
    with the same part.

    Args:
        node: a call of `collective` or of an op on shards, with the fake values of its arguments.
    """
    target: Any = node.target
    op, *args = (target.__name__, *node.args) if target in ON_SHARDS else node.args
    groups = groups_of(node)  # whose names differ from rank to rank
    text = f"{op}({', '.join(_argument_text(arg) for arg in args if arg not in groups)})"
    return [(text, group) for group in groups]


def _argument_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument_text, value))}]"
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    is_tensor = isinstance(value, torch.Tensor)
    return f"{value.dtype}{list(value.shape)}" if is_tensor else str(value)


def groups_of(node: fx.Node) -> list[str]:
    """The names of the process groups of a collective, by which ops know them."""
    if node.target is REDUCE:
        names: list[Any] = [node.args[3], *filter(None, node.args[6:])]
    elif node.target in ON_SHARDS:
        names = [node.args[3]]
    else:
        names = [node.kwargs.get("group_name", node.args[-1])]
    assert all(isinstance(name, str) for name in names)
    return names


def is_communication(target: Any) -> bool:
    """Whether all ranks of a group must make a call of this target."""
    return target is collective or target in ON_SHARDS
