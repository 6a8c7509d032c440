"""Which ops a group may hold: pointwise ops, and reductions over rows or columns.

All others stay as captured. Matrix products, convolutions and attention have kernels of libraries.
Random ops draw in eager's order. Batch normalization in training has a recomputation of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from rockmate._torch.ops import is_op
from rockmate.graph.ir import Op
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
        is_op(target)
        and target.namespace in ("aten", "prims")
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and isinstance(op.node.meta["val"], torch.Tensor)
    )


def is_reduction(op: Op) -> bool:
    """Whether it reduces rows or columns, and compiles into a loop beside pointwise ops."""
    return op.node.target in _REDUCTIONS


def is_fusible(op: Op) -> bool:
    """Whether a group may hold the op."""
    return is_pointwise(op) or is_reduction(op)
