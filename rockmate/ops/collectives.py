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
