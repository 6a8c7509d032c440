"""Separates the calls of a region along its rows, by one rule for each op, in graph order."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rockmate._torch.dispatch import is_op, schema_of
from rockmate.graph.chunking.forms import (
    ChunkedCall,
    Form,
    InseparableError,
    RegionCall,
    Rows,
    Rule,
)
from rockmate.graph.chunking.loss_rules import (
    SUMMED_LOSSES,
    SUMMED_LOSSES_BACKWARD,
    elementwise_loss_backward_rule,
    elementwise_loss_rule,
    nll_loss2d_backward_rule,
    nll_loss2d_rule,
    nll_loss_backward_rule,
    nll_loss_rule,
)
from rockmate.graph.chunking.rules import (
    along_another_dim_rule,
    cat_rule,
    elementwise_rule,
    expand_rule,
    indexed_rule,
    layer_norm_backward_rule,
    layer_norm_rule,
    like_rule,
    matrix_product_rule,
    mean_rule,
    new_rule,
    pad_rule,
    permute_rule,
    product_and_sum_rule,
    reduction_rule,
    reduction_with_indices_rule,
    select_rule,
    softmax_backward_rule,
    split_rule,
    squeeze_rule,
    sum_rule,
    transpose_rule,
    unsqueeze_rule,
    view_rule,
)
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply
from rockmate.ops.rng import is_random

_aten = torch.ops.aten


def separate(
    nodes: Sequence[fx.Node],
    input_rows: Mapping[fx.Node, Rows],
    num_rows: int,
    *,
    sum_readers: Collection[fx.Node] = (),
) -> dict[fx.Node, ChunkedCall]:
    """Derives how each call of a region runs on one chunk.

    Args:
        nodes: the calls of the region, in graph order.
        input_rows: values from outside -> their rows.
        num_rows: number of rows.
        sum_readers: calls of the region that may read sums of other calls over all rows. These are
            the calls of the backward if they run after all chunks of the forward.

    Raises:
        InseparableError: a call has no rule, or mixes rows.
    """
    forms: dict[fx.Node, Form] = dict(input_rows)
    chunked_calls: dict[fx.Node, ChunkedCall] = {}
    region = set(nodes)
    for node in nodes:
        add_chunked_call(node, chunked_calls, forms, region, num_rows, sum_readers)
    return chunked_calls


def add_chunked_call(
    node: fx.Node,
    chunked_calls: dict[fx.Node, ChunkedCall],
    forms: dict[fx.Node, Form],
    region: Collection[fx.Node],
    num_rows: int,
    sum_readers: Collection[fx.Node],
) -> None:
    """Adds to `chunked_calls` and `forms` what the rule of one call gives."""
    call = RegionCall(node, forms, region, num_rows, sum_readers)
    chunked_call = chunked_calls[node] = (
        call.getitem(chunked_calls) if node.target is operator.getitem else rule_of(node)(call)
    )
    if len(chunked_call.forms) == 1 and chunked_call.forms[0] is not None:
        forms[node] = chunked_call.forms[0]


def rule_of(node: fx.Node) -> Rule:
    """Returns the rule of a call.

    Raises:
        InseparableError: the call has no rule.
    """
    target = node.target
    found = _RULES.get(target)
    if found is not None:
        return found
    if is_elementwise(node):
        return elementwise_rule
    raise InseparableError(node, "has no rule for rows")


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends only on the operands' elements at its index."""
    target = node.target
    if not is_op(target):
        return _RULES.get(target) is elementwise_rule
    pointwise = (
        torch.Tag.pointwise in target.tags
        and not is_random(target)
        and len(schema_of(target).returns) == 1
    )
    return pointwise or _RULES.get(target) is elementwise_rule


_RULES: dict[Any, Rule] = {
    _aten.nll_loss2d_forward.default: nll_loss2d_rule,
    _aten.nll_loss2d_backward.default: nll_loss2d_backward_rule,
    **dict.fromkeys(SUMMED_LOSSES, elementwise_loss_rule),
    **dict.fromkeys(SUMMED_LOSSES_BACKWARD, elementwise_loss_backward_rule),
    **dict.fromkeys(
        (
            _aten._to_copy.default,
            _aten.detach.default,
            _aten.alias.default,
            _aten.hardtanh_backward.default,
        ),
        elementwise_rule,
    ),
    dropout_apply: elementwise_rule,
    **dict.fromkeys(
        (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default), view_rule
    ),
    **dict.fromkeys((_aten.t.default, _aten.transpose.int), transpose_rule),
    _aten.permute.default: permute_rule,
    _aten.expand.default: expand_rule,
    _aten.unsqueeze.default: unsqueeze_rule,
    **dict.fromkeys((_aten.squeeze.dim, _aten.squeeze.dims), squeeze_rule),
    _aten.select.int: select_rule,
    **dict.fromkeys((_aten.split.Tensor, _aten.split_with_sizes.default), split_rule),
    _aten.constant_pad_nd.default: pad_rule,
    _aten.cat.default: cat_rule,
    **dict.fromkeys(
        (
            _aten.zeros_like.default,
            _aten.ones_like.default,
            _aten.full_like.default,
            _aten.empty_like.default,
        ),
        like_rule,
    ),
    **dict.fromkeys(
        (
            _aten.new_zeros.default,
            _aten.new_ones.default,
            _aten.new_full.default,
            _aten.new_empty.default,
        ),
        new_rule,
    ),
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.sum.default), sum_rule),
    **dict.fromkeys((_aten.mean.dim, _aten.mean.default), mean_rule),
    **dict.fromkeys(
        (
            _aten.amax.default,
            _aten.amin.default,
            _aten.logsumexp.default,
            _aten.any.dim,
            _aten.argmax.default,
        ),
        reduction_rule,
    ),
    **dict.fromkeys((_aten.max.dim, _aten.min.dim), reduction_with_indices_rule),
    **dict.fromkeys(
        (_aten.slice.Tensor, _aten._softmax.default, _aten._log_softmax.default),
        along_another_dim_rule,
    ),
    **dict.fromkeys(
        (_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default),
        softmax_backward_rule,
    ),
    **dict.fromkeys(
        (_aten.gather.default, _aten.scatter.value, _aten.scatter.src, _aten.scatter_add.default),
        indexed_rule,
    ),
    _aten.native_layer_norm.default: layer_norm_rule,
    _aten.native_layer_norm_backward.default: layer_norm_backward_rule,
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default), matrix_product_rule),
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), product_and_sum_rule),
    _aten.nll_loss_forward.default: nll_loss_rule,
    **dict.fromkeys(
        (_aten.nll_loss_backward.default, cross_entropy_backward), nll_loss_backward_rule
    ),
}
