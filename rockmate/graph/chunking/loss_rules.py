"""Rules for losses and their gradients: how a loss runs on some rows of its operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rockmate.graph.chunking.forms import PARTIAL, Piece, RegionCall, Rows, shape_of
from rockmate.graph.chunking.rules import broadcast_rows, elementwise_rule

_aten = torch.ops.aten


# --- the loss ------------------------------------------------------------------------------------------

_NONE, _MEAN = 0, 1  # ATen's numbers for reductions


def nll_loss_rule(call: RegionCall) -> Piece:
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
    gradient, scores, target, weight, _, _, total_weight = call.args
    rows, slices = Rows(0, 1), dict[fx.Node, Rows]()
    call.at(scores, rows, slices)
    call.at(target, rows, slices)
    if shape_of(gradient):
        call.at(gradient, rows, slices)
    call.must_be_whole(weight, total_weight)
    return call.result(rows, slices=slices)


def nll_loss2d_rule(call: RegionCall) -> Piece:
    """Classes along dim 1 of the scores, which the targets have not."""
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
    """The rows where dim 1 is missing."""
    return Rows(rows.start - (rows.start > 1), rows.stop - (rows.start > 1))


def elementwise_loss_rule(call: RegionCall) -> Piece:
    """A loss of each element, added up or not; `SUMMED_LOSSES` says where its reduction stands."""
    reduction = call.option(SUMMED_LOSSES[call.node.target], _MEAN)
    if reduction == _MEAN:
        raise call.refuse("divides by a count of all rows")
    rows, slices = broadcast_rows(call, _broadcast_shape(call))
    return call.result(rows if reduction == _NONE else PARTIAL, slices=slices)


def elementwise_loss_backward_rule(call: RegionCall) -> Piece:
    if call.option(SUMMED_LOSSES_BACKWARD[call.node.target], _MEAN) == _MEAN:
        raise call.refuse("divides by a count of all rows")
    return elementwise_rule(call)


def _broadcast_shape(call: RegionCall) -> tuple[int, ...]:
    return tuple(
        torch.broadcast_shapes(*(shape_of(operand) for operand in call.node.all_input_nodes))
    )


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
"""Losses of single elements, and the place among their arguments of how they are reduced."""
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
"""Their gradients, of arguments (gradient, values, ...)."""
