"""Rules of losses and their gradients. `rules` defines forms and rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate.graph.chunking.forms import PARTIAL, ChunkedCall, RegionCall, Rows, shape_of
from rockmate.graph.chunking.rules import broadcast_rows, elementwise_rule, rule
from rockmate.ops.kernels import cross_entropy_backward

_aten = torch.ops.aten


# The values of ATen's argument `reduction`.
NONE, MEAN, SUM = 0, 1, 2

# Elementwise losses -> the position of the argument `reduction`.
SUMMED_LOSSES: dict[Any, int] = {
    _aten.mse_loss.default: 2,
    _aten.smooth_l1_loss.default: 2,
    _aten.huber_loss.default: 2,
    _aten.soft_margin_loss.default: 2,
    _aten.binary_cross_entropy.default: 3,
    _aten.binary_cross_entropy_with_logits.default: 4,
}

# Gradients of elementwise losses -> the position of the argument `reduction`. The arguments begin
# with the incoming gradient.
SUMMED_LOSSES_BACKWARD: dict[Any, int] = {
    _aten.mse_loss_backward.default: 3,
    _aten.smooth_l1_loss_backward.default: 3,
    _aten.huber_loss_backward.default: 3,
    _aten.soft_margin_loss_backward.default: 3,
    _aten.binary_cross_entropy_backward.default: 4,
}


@rule(_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
def nll_loss_rule(call: RegionCall) -> ChunkedCall:
    """`nll_loss_forward`: unreduced by rows, a sum partial, a mean refused. Weight sum partial.

    Only the scores have a dim 1, of classes.
    """
    scores, target, weight, reduction, _ = call.args
    rows, slices = call.known_rows(scores), dict[fx.Node, Rows]()
    call.require_other_dims(rows, [1], len(shape_of(scores)))
    if reduction == MEAN:
        raise call.refuse("divides by a count over all rows")
    of_target = _without_classes(rows)
    call.require_rows(target, of_target, slices)
    call.require_whole(weight)
    return ChunkedCall(forms=(of_target if reduction == NONE else PARTIAL, PARTIAL), slices=slices)


@rule(
    _aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default, cross_entropy_backward,
)  # fmt: skip
def nll_loss_backward_rule(call: RegionCall) -> ChunkedCall:
    """`nll_loss_backward`: by rows, from the same rows of the scores and the weight of all rows."""
    gradient, scores, target, weight, _, _, total_weight = call.args
    num_dims, slices = len(shape_of(scores)), dict[fx.Node, Rows]()
    rows = Rows(0, 1) if num_dims == 2 else call.rows(scores)
    if rows is None:
        of_target = call.known_rows(gradient if shape_of(gradient) else target)
        rows = Rows(of_target.start + bool(of_target.start), of_target.stop + bool(of_target.start))
    call.require_other_dims(rows, [1], num_dims)
    call.require_rows(scores, rows, slices)
    if rows.start and scores in slices:
        raise call.refuse(f"needs a contiguous {scores.name}, and its slices are not contiguous")
    call.require_rows(target, _without_classes(rows), slices)
    if shape_of(gradient):
        call.require_rows(gradient, _without_classes(rows), slices)
    call.require_whole(weight, total_weight)
    return call.result(rows, slices=slices)


def _without_classes(rows: Rows) -> Rows:
    """Returns the rows of a value after dim 1 is removed."""
    return Rows(rows.start - (rows.start > 1), rows.stop - (rows.start > 1))


@rule(*SUMMED_LOSSES)
def elementwise_loss_rule(call: RegionCall) -> ChunkedCall:
    """Elementwise losses: unreduced by rows, a sum partial, a mean refused."""
    reduction = call.option(SUMMED_LOSSES[call.node.target], MEAN)
    if reduction == MEAN:
        raise call.refuse("divides by a count over all rows")
    shape = torch.broadcast_shapes(*map(shape_of, call.node.all_input_nodes))
    rows, slices = broadcast_rows(call, shape)
    return call.result(rows if reduction == NONE else PARTIAL, slices=slices)


@rule(*SUMMED_LOSSES_BACKWARD)
def elementwise_loss_backward_rule(call: RegionCall) -> ChunkedCall:
    """Gradients of elementwise losses: by rows as `elementwise_rule`, a mean refused."""
    if call.option(SUMMED_LOSSES_BACKWARD[call.node.target], MEAN) == MEAN:
        raise call.refuse("divides by a count over all rows")
    return elementwise_rule(call)
