"""Checks that calls of a backward are linear in the incoming gradient.

If they are linear, gradients can be computed for an incoming gradient of one and scaled afterwards.
Autograd's formulas are linear. A hook or a custom backward can be nonlinear, for example by
clipping. So each call is looked up in a table, and a call outside the table counts as nonlinear.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import calls_in, reads_no_values
from rockmate.graph.chunking.forms import InseparableError
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply

_aten = torch.ops.aten

# Calls that are linear in their first operand if the other operands are fixed.
_LINEAR_IN_FIRST = {
    *(_aten.t.default, _aten.transpose.int, _aten.permute.default),
    *(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default),
    *(_aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
    *(_aten.slice.Tensor, _aten.slice_backward.default, _aten.select.int, _aten.unbind.int),
    operator.getitem,
    *(_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default),
    *(_aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim, _aten.mean.default),
    *(_aten.neg.default, _aten.mul.Scalar, _aten.div.Scalar, _aten.div.Tensor),
    *(_aten.gather.default, dropout_apply, _aten.native_layer_norm_backward.default),
    *(_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default),
    *(_aten.tanh_backward.default, _aten.sigmoid_backward.default),
    *(_aten.gelu_backward.default, _aten.silu_backward.default),
    *(_aten.threshold_backward.default, _aten.hardtanh_backward.default),
    *(_aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default),
    *(_aten.huber_loss_backward.default, _aten.soft_margin_loss_backward.default),
    *(_aten.binary_cross_entropy_backward.default, _aten.nll_loss2d_backward.default),
    *(_aten.nll_loss_backward.default, cross_entropy_backward),
}
_BILINEAR = {_aten.mul.Tensor, _aten.mm.default, _aten.bmm.default}
_SUMS = {_aten.add.Tensor, _aten.sub.Tensor}


def dependents(gradient: fx.Node, graph: fx.Graph, *, of_shape: bool = False) -> set[fx.Node]:
    """Returns the gradient and every call whose values depend on it; with `of_shape`, its shape."""
    found = {gradient}
    for node in calls_in(graph):
        reads = of_shape or not reads_no_values(node)
        if reads and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def check_linear(nodes: Iterable[fx.Node], dependent: Collection[fx.Node]) -> None:
    """Checks that calls are linear in their operands in `dependent`.

    Raises:
        InseparableError: a call is not known to be linear, or its result is in float16.
    """
    for node in nodes:
        if not is_linear(node, dependent):
            raise InseparableError(node, "is not known to be linear in the gradient of the loss")
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.dtype is torch.float16:
            raise InseparableError(
                node,
                "is in float16, and a gradient that is scaled afterwards may underflow to zero",
            )


def is_linear(node: fx.Node, dependent: Collection[fx.Node]) -> bool:
    """Whether a call is known to be linear in its operands in `dependent`, all else fixed."""
    target, operands = node.target, [value for value in node.args if isinstance(value, fx.Node)]
    inside = [operand for operand in operands if operand in dependent]
    if target in _LINEAR_IN_FIRST:
        return inside == [node.args[0]] and operands.count(inside[0]) == 1
    if target in _BILINEAR:
        return len(inside) == 1
    if target in _SUMS:
        return all(value in dependent or is_zero(value) for value in node.args[:2])
    if target is _aten.where.self:
        return node.args[0] not in dependent and all(
            value in dependent or is_zero(value) for value in node.args[1:]
        )
    if target in (_aten.masked_fill.Scalar, _aten.masked_fill.Tensor):
        return inside == [node.args[0]] and is_zero(node.args[2])
    if target in (_aten.cat.default, _aten.stack.default):
        return isinstance(node.args[0], tuple | list) and all(
            value in dependent for value in node.args[0]
        )
    if target in (_aten.scatter.src, _aten.scatter_add.default):
        return node.args[2] not in dependent and all(
            value in dependent or is_zero(value) for value in (node.args[0], node.args[3])
        )
    return False


def is_zero(value: Any) -> bool:
    """Whether a value is known to be zero everywhere."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int | float) and value == 0
    if value.target in (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default):
        return True
    if value.target in (_aten.full.default, _aten.full_like.default):
        return is_zero(value.args[1])
    if value.target is _aten.scalar_tensor.default:
        return is_zero(value.args[0])
    views = (_aten.expand.default, _aten.view.default, _aten.slice.Tensor)
    return value.target in views and is_zero(value.args[0])
