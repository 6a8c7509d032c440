"""Which ops a group may hold: pointwise ops, and reductions over rows or columns.

All others stay as captured. Matrix products, convolutions and attention have kernels of libraries.
Random ops draw in eager's order. Batch normalization in training has a recomputation of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate.capture import nodes
from rockmate.graph.ir import Op
from rockmate.graph.rewrite import REDUCED_IN_PLACE
from rockmate.ops.kernels import dropout_apply

_aten = torch.ops.aten

# Ops that compute each element of the result from one of each operand, or place it elsewhere, and
# that PyTorch does not mark as pointwise.
_UNMARKED = {
    _aten._to_copy.default,
    _aten.cat.default,
    _aten.clone.default,
    _aten.elu_backward.default,
    _aten.glu.default,
    _aten.glu_backward.default,
    _aten.hardsigmoid_backward.default,
    _aten.hardswish.default,
    _aten.hardswish_backward.default,
    _aten.hardtanh_backward.default,
    _aten.leaky_relu_backward.default,
    _aten.masked_fill.Tensor,
    _aten.mish_backward.default,
    _aten.native_dropout_backward.default,
    _aten.rsub.Tensor,
    _aten.select_backward.default,
    _aten.slice_backward.default,
    _aten.softplus_backward.default,
}
# Compiled, these are other functions: quotients jump where they are rounded otherwise, `acosh`
# overflows, and an integer divided by zero ends the process instead of raising.
_OTHERWISE = {_aten.acosh, _aten.div, _aten.floor_divide, _aten.fmod, _aten.remainder}
_REDUCTIONS = {
    _aten._log_softmax.default,
    _aten._softmax.default,
    _aten._softmax_backward_data.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.mean.dim,
    _aten.native_layer_norm.default,
    _aten.native_layer_norm_backward.default,
    _aten.sum.dim_IntList,
    _aten.var_mean.correction,
}


def is_pointwise(op: Op) -> bool:
    """Whether each element of the result comes from one element of each operand."""
    target: Any = op.node.target
    if target is dropout_apply or target in _UNMARKED:
        return True
    return (
        nodes.is_pointwise(op.node)
        and target.namespace in ("aten", "prims")
        and not (target.overloadpacket in _OTHERWISE and target is not _aten.div.Tensor)
    )


def is_reduction(op: Op) -> bool:
    """Whether it reduces rows or columns, and compiles into a loop beside pointwise ops."""
    return op.node.target in _REDUCTIONS


def is_fusible(op: Op) -> bool:
    """Whether a group may hold the op."""
    return (is_pointwise(op) or is_reduction(op)) and not _releases_memory(op)


def _releases_memory(op: Op) -> bool:
    """Whether it copies a loss out of memory as large as what the loss reduces."""
    if op.node.target is not _aten.clone.default:
        return False
    copied = op.node.args[0]
    return isinstance(copied, fx.Node) and copied.target in REDUCED_IN_PLACE
