"""Rules that separate ops along rows: the form of the result, and the call on one chunk.

A region of the graph is separated along its *rows*: tokens or samples. Each value has one of three
forms:

- `Rows(start, stop)`: dims `start` to `stop` - 1 together run over the rows, in order. They are one
  dim, or adjacent dims such as batch x tokens. A chunk has its own rows in dims 1 x ... x 1 x rows.
- *whole*: the value is the same for every chunk. Weights and counts are whole.
- *partial*: the value is a sum over the rows, equal to the sum of the chunks' results. A loss and
  the gradient of a weight are partial.

The rule of an op derives the form of its result from the forms of its operands. An operand from
outside the region has no form: it is sliced if the rule needs its rows, and whole otherwise. A
slice is exact. The region is inseparable if a call has no rule or mixes rows. The error names the
call.

docs/internals/algorithms.md has the rules as equations and proves that chunks give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from rockmate.graph.chunking.forms import (
    PARTIAL,
    ChunkedCall,
    Form,
    RegionCall,
    Rows,
    Rule,
    rows_within,
    shape_of,
    tensors_in,
)
from rockmate.graph.chunking.linearity import is_zero
from rockmate.ops.kernels import dropout_apply

_aten = torch.ops.aten
RULES: dict[Any, Rule] = {}
"""The rule of each call target that has one."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Makes a function the rule of some call targets."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


# --- elementwise ----------------------------------------------------------------------------------


@rule(
    _aten._to_copy.default, _aten.detach.default, _aten.alias.default,
    _aten.hardtanh_backward.default, dropout_apply,
)  # fmt: skip
def elementwise_rule(call: RegionCall) -> ChunkedCall:
    """Elementwise ops: by rows, where the operands broadcast, aligned at the last dim."""
    rows, slices = broadcast_rows(call, call.shape)
    return call.result(rows, slices=slices)


def broadcast_rows(call: RegionCall, shape: Sequence[int]) -> tuple[Rows, dict[fx.Node, Rows]]:
    """Returns the rows of operands broadcast to `shape`, and the rows of the sliced operands."""
    operands = tensors_in(call.node.all_input_nodes)
    shifts = {operand: len(shape) - len(shape_of(operand)) for operand in operands}
    found = {
        Rows(rows.start + shifts[operand], rows.stop + shifts[operand])
        for operand in operands
        if (rows := call.rows(operand)) is not None
    }
    if len(found) != 1:
        raise call.refuse(
            "reads its operands' rows along different dims" if found else "reads no operand by rows"
        )
    rows = found.pop()
    slices: dict[fx.Node, Rows] = {}
    for operand in operands:
        if call.rows(operand) is None:
            start, stop = max(0, rows.start - shifts[operand]), max(0, rows.stop - shifts[operand])
            across = prod(shape_of(operand)[start:stop])
            if across > 1 and call.space.copies(across) and call.form(operand) is None:
                slices[operand] = rows_within(shape_of(operand), start, stop)
            elif across != 1:
                raise call.refuse(f"broadcasts {operand.name} along a part of the rows")
    return rows, slices


# --- constants of a value's shape -----------------------------------------------------------------


@rule(
    _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
    _aten.empty_like.default,
)  # fmt: skip
def like_rule(call: RegionCall) -> ChunkedCall:
    """`zeros_like` and similar ops: by the rows of the operand."""
    return call.result(call.known_rows(call.args[0]))


@rule(
    _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default,
    _aten.new_empty.default,
)  # fmt: skip
def new_rule(call: RegionCall) -> ChunkedCall:
    """`new_zeros` and similar ops: by the rows of the operand, if the shape is the operand's."""
    source, rows = call.args[0], call.known_rows(call.args[0])
    if shape_of(source) != call.shape:
        raise call.refuse("creates a tensor of another shape")
    return call.result(rows, args=(source, call.chunk_shape(call.shape, rows), *call.args[2:]))


# --- reductions, softmax --------------------------------------------------------------------------


def _reduced(call: RegionCall) -> Rows:
    """Returns the rows of the result of a reduction. Refuses a reduction over the rows."""
    rows, num_dims = call.known_rows(call.args[0]), len(shape_of(call.args[0]))
    dims = _dims_of(call)
    call.require_other_dims(rows, dims, num_dims)
    shift = 0 if call.option(2, False) else sum(dim % num_dims < rows.start for dim in dims)
    return Rows(rows.start - shift, rows.stop - shift)


def _dims_of(call: RegionCall) -> list[int]:
    """Returns the dims of a reduction. A call without dims reduces all of them."""
    named = call.option(1, None)
    num_dims = len(shape_of(call.args[0]))
    dims = [] if named is None else named if isinstance(named, tuple | list) else [named]
    return [dim % num_dims for dim in dims] or list(range(num_dims))


@rule(_aten.sum.dim_IntList, _aten.sum.default)
def sum_rule(call: RegionCall) -> ChunkedCall:
    """`sum`: by rows over other dims only, partial if the dims include all of the rows."""
    source = call.args[0]
    rows, dims = call.known_rows(source), _dims_of(call)
    across = [dim for dim in dims if rows.start <= dim < rows.stop]
    if not across:
        return call.result(_reduced(call))
    if prod(shape_of(source)[dim] for dim in across) != prod(
        shape_of(source)[rows.start : rows.stop]
    ):
        raise call.refuse("adds up some of the rows' dims only")
    return call.result(PARTIAL)


@rule(_aten.mean.dim, _aten.mean.default)
def mean_rule(call: RegionCall) -> ChunkedCall:
    """`mean`: as `sum_rule`. A partial mean is a partial sum divided by the number of elements."""
    chunked_call = sum_rule(call)
    if chunked_call.forms[0] is not PARTIAL:
        return chunked_call
    dims = _dims_of(call)
    args = (call.args[0], dims, call.option(2, False))
    return call.result(
        PARTIAL,
        target=_aten.sum.dim_IntList,
        args=args,
        divisor=prod(shape_of(call.args[0])[dim] for dim in dims),
    )


@rule(
    _aten.amax.default, _aten.amin.default, _aten.logsumexp.default, _aten.any.dim,
    _aten.argmax.default,
)  # fmt: skip
def reduction_rule(call: RegionCall) -> ChunkedCall:
    """Reductions (operand, dims, keepdim): by rows, if they reduce other dims only."""
    return call.result(_reduced(call))


@rule(_aten.max.dim, _aten.min.dim)
def reduction_with_indices_rule(call: RegionCall) -> ChunkedCall:
    """`max.dim`, `min.dim`: both results by rows, as `reduction_rule`."""
    rows = _reduced(call)
    return ChunkedCall(forms=(rows, rows))


@rule(_aten._softmax.default, _aten._log_softmax.default)
def along_another_dim_rule(call: RegionCall) -> ChunkedCall:
    """Ops (operand, dim, ...) that keep all dims: by rows, if they run along another dim."""
    rows = call.known_rows(call.args[0])
    call.require_other_dims(rows, [call.option(1, 0)], len(shape_of(call.args[0])))
    return call.result(rows)


@rule(_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)
def softmax_backward_rule(call: RegionCall) -> ChunkedCall:
    """Gradients of softmax: by rows, if gradient and output have the same rows."""
    gradient, output, dim, _ = call.args
    rows, slices = call.rows_of_all((gradient, output))
    call.require_other_dims(rows, [dim], len(call.shape))
    return call.result(rows, slices=slices)


@rule(_aten.gather.default, _aten.scatter.value, _aten.scatter.src, _aten.scatter_add.default)
def indexed_rule(call: RegionCall) -> ChunkedCall:
    """`gather`, `scatter`, `scatter_add`: by rows shared by all tensors, along another dim."""
    rows, slices = call.rows_of_all(filter(shape_of, tensors_in(call.args)))
    call.require_other_dims(rows, [call.args[1]], len(call.shape))
    return call.result(rows, slices=slices)


# --- normalization --------------------------------------------------------------------------------


@rule(_aten.native_layer_norm.default)
def layer_norm_rule(call: RegionCall) -> ChunkedCall:
    """`native_layer_norm`: the result and both statistics by rows, if it normalizes other dims."""
    rows, num_dims = call.known_rows(call.args[0]), len(shape_of(call.args[0]))
    call.require_other_dims(rows, range(num_dims - len(call.args[1]), num_dims), num_dims)
    call.require_whole(*call.args[2:4])
    return ChunkedCall(forms=(rows, rows, rows))


@rule(_aten.native_layer_norm_backward.default)
def layer_norm_backward_rule(call: RegionCall) -> ChunkedCall:
    """`native_layer_norm_backward`: input gradient by rows, weight and bias gradients partial."""
    gradient, source, normalized, mean, deviation, weight, bias, _ = call.args
    rows, slices = call.rows_of_all((gradient, source, mean, deviation))
    num_dims = len(shape_of(source))
    call.require_other_dims(rows, range(num_dims - len(normalized), num_dims), num_dims)
    call.require_whole(weight, bias)
    return ChunkedCall(forms=(rows, PARTIAL, PARTIAL), slices=slices)


# --- matrix products ------------------------------------------------------------------------------


def _product_form(
    call: RegionCall, left: fx.Node, right: fx.Node
) -> tuple[Form, dict[fx.Node, Rows]]:
    """Returns the form of a product (..., i, k) x (..., k, j), and the sliced operands.

    The product has the rows if they run along i, j or a batch dim. It is partial if they run
    along k.
    """
    num_dims = len(call.shape)
    slices: dict[fx.Node, Rows] = {}
    row, column = Rows(num_dims - 2, num_dims - 1), Rows(num_dims - 1, num_dims)
    of_left, of_right = call.rows(left), call.rows(right)
    if of_left == row:
        call.require_whole(right)
        return row, slices
    if of_right == column:
        call.require_whole(left)
        return column, slices
    if of_left == column or of_right == row:
        call.require_rows(left, column, slices)
        call.require_rows(right, row, slices)
        return PARTIAL, slices
    if any(rows and rows.stop > num_dims - 2 for rows in (of_left, of_right)):
        raise call.refuse("has the rows in a batch dim and a matrix dim")
    return call.rows_of_all((left, right))


@rule(_aten.mm.default, _aten.bmm.default)
def matrix_product_rule(call: RegionCall) -> ChunkedCall:
    """`mm`, `bmm`: by rows, if they run along a dim of the result, partial along the summed dim."""
    form, slices = _product_form(call, *call.args)
    return call.result(form, slices=slices)


@rule(_aten.addmm.default, _aten.baddbmm.default)
def product_and_sum_rule(call: RegionCall) -> ChunkedCall:
    """`addmm`, `baddbmm`: as `matrix_product_rule`. To a partial product, only zeros are added."""
    value, left, right = call.args
    form, slices = _product_form(call, left, right)
    if not isinstance(form, Rows):
        if is_zero(value):
            target = _aten.mm if call.node.target is _aten.addmm.default else _aten.bmm
            return call.result(form, target=target.default, args=(left, right), slices=slices)
        raise call.refuse("adds a value to a product that sums over the rows")
    shift = len(call.shape) - len(shape_of(value))
    start, stop = max(0, form.start - shift), max(0, form.stop - shift)
    across = prod(shape_of(value)[start:stop])
    if across > 1 and call.space.copies(across):
        call.require_rows(value, Rows(start, stop), slices)
    elif across != 1 or call.rows(value):
        raise call.refuse(f"broadcasts {value.name} along a part of the rows")
    return call.result(form, slices=slices)
