"""Fake results of calls that a pass adds to a joint graph or moves to other memory.

A node's `meta["val"]` has the result of its call as fake tensors: shapes, dtypes, layouts, and
which of them share a storage. A pass that adds a call, or gives a view another base, keeps that
true with these functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from rockmate._torch.autocast import autocast_off
from rockmate._torch.fake import mode_of
from rockmate.capture.nodes import storage_ids, tensors_of
from rockmate.ops.convolutions import (
    convolution_backward_in_slices,
    convolution_in_slices,
    input_gradient,
)
from rockmate.ops.kernel_layouts import in_kernel_layout
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply

_aten = torch.ops.aten


def _masked(values: torch.Tensor, mask: torch.Tensor, _: float, *layout: Any) -> torch.Tensor:
    masked = torch.mul(values, mask)
    return masked.clone(memory_format=layout[0]) if layout else masked


# For a kernel, a call whose result has the same layout. These kernels read values, which fake
# tensors lack, or they take many steps.
_STAND_INS: dict[Any, Any] = {
    dropout_apply: _masked,
    cross_entropy_backward: lambda _, scores, *__: torch.empty_like(scores),
    convolution_in_slices: _aten.convolution.default,
    convolution_backward_in_slices: _aten.convolution_backward.default,
    input_gradient: lambda size, layout, grad, *_: grad.new_empty_strided(size, layout),
}


def fake_result(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, like: fx.Node
) -> Any:
    """The result of a call on the fake values of the nodes among its arguments.

    It has the layout of the kernel. The fake mode is that of `like`, any node of the graph.
    """
    given = fx.map_arg((args, dict(kwargs)), lambda argument: argument.meta["val"])
    with mode_of(tensors_of(like)[0]), torch.no_grad(), autocast_off():
        result = _STAND_INS.get(target, target)(*given[0], **given[1])
        return in_kernel_layout(target, *given, result)


def insert_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """Inserts a call with its fake result. Module and source line are those of `like`."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta = {
        key: value for key, value in like.meta.items() if key not in {"val", "tensor_meta"}
    }
    node.meta["val"] = fake_result(target, node.args, node.kwargs, like=like)
    return node


def refresh(node: fx.Node) -> None:
    """Sets a node's fake value again from those of its arguments."""
    node.meta["val"] = fake_result(node.target, node.args, node.kwargs, like=node)


def refresh_views(node: fx.Node, left: Collection[int]) -> None:
    """Refreshes the views of a node that has replaced another.

    Args:
        node: the node, with its readers.
        left: storages of the replaced node. The readers' fake values still lie in them.
    """
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "call_function" and not set(storage_ids(user)).isdisjoint(left):
                refresh(user)
                pending.append(user)
