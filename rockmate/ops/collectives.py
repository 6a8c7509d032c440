"""A collective that returns when its result is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate._torch.distributed import wait_for
from rockmate.ops.shards import ON_SHARDS


def collective(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs a functional collective and waits for its result.

    Args:
        op: the overload that issues it.
        *args: its arguments; the last names the process group.
        **kwargs: its keywords.
    """
    return wait_for(op(*args, **kwargs))


def collective_text(node: fx.Node) -> tuple[str, str]:
    """A collective as text that is equal on all ranks that may meet in it, and its group.

    Args:
        node: a call of `collective` or of an op on shards, with the fake values of its arguments.
    """
    target: Any = node.target
    op, *args = (target.__name__, *node.args) if target in ON_SHARDS else node.args
    return f"{op}({', '.join(map(_argument_text, args))})", group_of(node)


def _argument_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument_text, value))}]"
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    is_tensor = isinstance(value, torch.Tensor)
    return f"{value.dtype}{list(value.shape)}" if is_tensor else str(value)


def group_of(node: fx.Node) -> str:
    """The name of the process group of a collective, by which ops know it."""
    if node.target in ON_SHARDS:
        name = node.args[3]
    else:
        name = node.kwargs.get("group_name", node.args[-1])
    assert isinstance(name, str)
    return name


def is_communication(target: Any) -> bool:
    """Whether all ranks of a group must make a call of this target."""
    return target is collective or target in ON_SHARDS
