"""Rules for losses and their gradients on some rows of their operands. See `rules`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate.graph.chunking.forms import PARTIAL, Piece, RegionCall, Rows, shape_of
from rockmate.graph.chunking.rules import broadcast_rows, elementwise_rule

_aten = torch.ops.aten


# ATen's numbers for reductions.
_NONE, _MEAN = 0, 1


def nll_loss_rule(call: RegionCall) -> Piece:
    """`nll_loss_forward`: by rows if it is not reduced, else partial. A mean has no rule."""
    scores, target, weight, reduction, _ = call.args
    rows, slices = call.only(scores), dict[fx.Node, Rows]()
    if rows != Rows(0, 1):
        raise call.refuse("takes classes along the rows")
    if reduction == _MEAN:
        raise call.refuse("divides by a count of all rows")
    call.at(target, rows, slices)
    call.must_be_whole(weight)
    return Piece(forms=(rows if reduction == _NONE else PARTIAL, PARTIAL), slices=slices)


def nll_loss_backward_rule(call: RegionCall) -> Piece:
    """`nll_loss_backward`: each row from the row of the scores, with the weight of all rows."""
    gradient, scores, target, weight, _, _, total_weight = call.args
    rows, slices = Rows(0, 1), dict[fx.Node, Rows]()
    call.at(scores, rows, slices)
    call.at(target, rows, slices)
    if shape_of(gradient):
        call.at(gradient, rows, slices)
    call.must_be_whole(weight, total_weight)
    return call.result(rows, slices=slices)


def nll_loss2d_rule(call: RegionCall) -> Piece:
    """`nll_loss2d_forward`: as `nll_loss_rule`; scores have classes along dim 1, targets do not."""
    scores, target, weight, reduction, _ = call.args
    rows, slices = call.only(scores), dict[fx.Node, Rows]()
    call.outside_dims(rows, [1], len(shape_of(scores)))
    if reduction == _MEAN:
        raise call.refuse("divides by a count of all rows")
    of_target = _without_classes(rows)
    call.at(target, of_target, slices)
    call.must_be_whole(weight)
    return Piece(forms=(of_target if reduction == _NONE else PARTIAL, PARTIAL), slices=slices)


def nll_loss2d_backward_rule(call: RegionCall) -> Piece:
    """`nll_loss2d_backward`: as `nll_loss_backward_rule`; scores have classes along dim 1."""
    gradient, scores, target, weight, _, _, total_weight = call.args
    rows, slices = call.rows(scores), dict[fx.Node, Rows]()
    if rows is None:
        of_target = call.only(gradient if shape_of(gradient) else target)
        rows = Rows(of_target.start + bool(of_target.start), of_target.stop + bool(of_target.start))
    call.outside_dims(rows, [1], len(shape_of(scores)))
    call.at(scores, rows, slices)
    if rows.start and scores in slices:
        raise call.refuse(f"wants {scores.name} side by side, which its slices are not")
    call.at(target, _without_classes(rows), slices)
    if shape_of(gradient):
        call.at(gradient, _without_classes(rows), slices)
    call.must_be_whole(weight, total_weight)
    return call.result(rows, slices=slices)


def _without_classes(rows: Rows) -> Rows:
    """The rows of a value without dim 1."""
    return Rows(rows.start - (rows.start > 1), rows.stop - (rows.start > 1))


def elementwise_loss_rule(call: RegionCall) -> Piece:
    """A loss of each element: by rows if it is not reduced, else partial. A mean has no rule."""
    reduction = call.option(SUMMED_LOSSES[call.node.target], _MEAN)
    if reduction == _MEAN:
        raise call.refuse("divides by a count of all rows")
    rows, slices = broadcast_rows(call, _broadcast_shape(call))
    return call.result(rows if reduction == _NONE else PARTIAL, slices=slices)


def elementwise_loss_backward_rule(call: RegionCall) -> Piece:
    """The gradient of such a loss: elementwise, except for a mean, which has no rule."""
    if call.option(SUMMED_LOSSES_BACKWARD[call.node.target], _MEAN) == _MEAN:
        raise call.refuse("divides by a count of all rows")
    return elementwise_rule(call)


def _broadcast_shape(call: RegionCall) -> tuple[int, ...]:
    return tuple(
        torch.broadcast_shapes(*(shape_of(operand) for operand in call.node.all_input_nodes))
    )


# Losses of single elements -> the position of the reduction among their arguments.
SUMMED_LOSSES: dict[Any, int] = {
    **dict.fromkeys(
        (
            _aten.mse_loss.default,
            _aten.smooth_l1_loss.default,
            _aten.huber_loss.default,
            _aten.soft_margin_loss.default,
        ),
        2,
    ),
    _aten.binary_cross_entropy.default: 3,
    _aten.binary_cross_entropy_with_logits.default: 4,
}

# The same for their gradients, of arguments (gradient, values, ...).
SUMMED_LOSSES_BACKWARD: dict[Any, int] = {
    **dict.fromkeys(
        (
            _aten.mse_loss_backward.default,
            _aten.smooth_l1_loss_backward.default,
            _aten.huber_loss_backward.default,
        ),
        3,
    ),
    _aten.soft_margin_loss_backward.default: 3,
    _aten.binary_cross_entropy_backward.default: 4,
}
