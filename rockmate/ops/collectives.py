"""A collective that returns when its result is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate._torch.distributed import wait_for


def collective(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs a functional collective and waits for its result.

    Args:
        op: the overload that issues it.
        *args: its arguments; the last names the process group.
        **kwargs: its keywords.
    """
    return wait_for(op(*args, **kwargs))


def collective_text(node: fx.Node) -> tuple[str, str]:
    """A call of `collective` as text that is equal on all ranks that may meet in it, and its group.

    Args:
        node: with the fake values of its arguments.
    """
    op, *args = node.args
    texts = []
    for each in args:
        value = each.meta["val"] if isinstance(each, fx.Node) else each
        is_tensor = isinstance(value, torch.Tensor)
        texts.append(f"{value.dtype}{list(value.shape)}" if is_tensor else str(value))
    return f"{op}({', '.join(texts)})", group_of(node)


def group_of(node: fx.Node) -> str:
    """The name of the process group of a call of `collective`, by which ops know it."""
    name = node.kwargs.get("group_name", node.args[-1])
    assert isinstance(name, str)
    return name
