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
    CHUNK_ROWS,
    PARTIAL,
    ChunkedCall,
    Form,
    RegionCall,
    Rows,
    Rule,
    chunk_shape,
    rows_within,
    shape_of,
    tensors_in,
)
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
            if across == call.num_rows and call.is_outside(operand):
                slices[operand] = rows_within(shape_of(operand), start, stop)
            elif across != 1:
                raise call.refuse(f"broadcasts {operand.name} along a part of the rows")
    return rows, slices


# --- views ----------------------------------------------------------------------------------------


@rule(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
def view_rule(call: RegionCall) -> ChunkedCall:
    """`view`, `reshape`: by rows, if adjacent dims of the result run over exactly the rows."""
    source, rows = call.args[0], call.known_rows(call.args[0])
    before, shape = prod(shape_of(source)[: rows.start]), call.shape
    for start in range(len(shape)):
        if prod(shape[:start]) != before:
            continue
        for stop in range(start + 1, len(shape) + 1):
            if prod(shape[start:stop]) == call.num_rows:
                found = rows_within(shape, start, stop)
                return call.result(found, args=(source, chunk_shape(shape, found, CHUNK_ROWS)))
    raise call.refuse("merges the rows with another dim")


def _permuted(call: RegionCall, order: Sequence[int]) -> ChunkedCall:
    """A permutation: by rows, if their dims stay adjacent and in order.

    Dim `order[i]` of the operand becomes dim i.
    """
    rows = call.known_rows(call.args[0])
    places = [order.index(dim) for dim in range(rows.start, rows.stop)]
    if places != list(range(places[0], places[0] + len(places))):
        raise call.refuse("takes the dims of the rows apart")
    return call.result(Rows(places[0], places[-1] + 1))


@rule(_aten.t.default, _aten.transpose.int)
def transpose_rule(call: RegionCall) -> ChunkedCall:
    """`t`, `transpose`: by rows, if their dims stay adjacent and in order."""
    order = list(range(len(call.shape)))
    first, second = (call.args[1], call.args[2]) if len(call.args) > 1 else (0, -1)
    if order:
        order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


@rule(_aten.permute.default)
def permute_rule(call: RegionCall) -> ChunkedCall:
    """`permute`: by rows, if their dims stay adjacent and in order."""
    return _permuted(call, [dim % len(call.shape) for dim in call.args[1]])


@rule(_aten.expand.default)
def expand_rule(call: RegionCall) -> ChunkedCall:
    """`expand`: by rows, shifted by the leading dims that it adds."""
    source, shape = call.args[0], call.shape
    rows, shift = call.known_rows(source), len(shape) - len(shape_of(source))
    moved = Rows(rows.start + shift, rows.stop + shift)
    return call.result(moved, args=(source, chunk_shape(shape, moved, CHUNK_ROWS), *call.args[2:]))


@rule(_aten.unsqueeze.default)
def unsqueeze_rule(call: RegionCall) -> ChunkedCall:
    """`unsqueeze`: by rows, if the added dim is not between dims of the rows."""
    rows, dim = call.known_rows(call.args[0]), call.args[1] % len(call.shape)
    if rows.start < dim < rows.stop:
        raise call.refuse("takes the dims of the rows apart")
    shift = int(dim <= rows.start)
    return call.result(Rows(rows.start + shift, rows.stop + shift))


@rule(_aten.squeeze.dim, _aten.squeeze.dims)
def squeeze_rule(call: RegionCall) -> ChunkedCall:
    """`squeeze`: by rows, if it removes other dims.

    The call on a chunk names the removed dims, because a chunk may have a single row.
    """
    source = call.args[0]
    rows, shape = call.known_rows(source), shape_of(source)
    dims = call.args[1] if isinstance(call.args[1], tuple | list) else [call.args[1]]
    gone = {dim % len(shape) for dim in dims if shape[dim] == 1}
    call.require_other_dims(rows, gone, len(shape))
    shift = sum(dim < rows.start for dim in gone)
    return call.result(
        Rows(rows.start - shift, rows.stop - shift),
        args=(source, sorted(gone)),
        target=_aten.squeeze.dims,
    )


@rule(_aten.slice.Tensor, _aten._softmax.default, _aten._log_softmax.default)
def along_another_dim_rule(call: RegionCall) -> ChunkedCall:
    """Ops (operand, dim, ...) that keep all dims: by rows, if they run along another dim."""
    rows = call.known_rows(call.args[0])
    call.require_other_dims(rows, [call.option(1, 0)], len(shape_of(call.args[0])))
    return call.result(rows)


@rule(_aten.split.Tensor, _aten.split_with_sizes.default)
def split_rule(call: RegionCall) -> ChunkedCall:
    """`split`: every result by rows, if it splits another dim."""
    rows = call.known_rows(call.args[0])
    call.require_other_dims(rows, [call.option(2, 0)], len(shape_of(call.args[0])))
    return ChunkedCall(forms=(rows,) * len(call.node.meta["val"]))


@rule(_aten.select.int)
def select_rule(call: RegionCall) -> ChunkedCall:
    """`select`: by rows, if it removes another dim."""
    rows, dim = call.known_rows(call.args[0]), call.args[1] % len(shape_of(call.args[0]))
    call.require_other_dims(rows, [dim], len(shape_of(call.args[0])))
    shift = int(dim < rows.start)
    return call.result(Rows(rows.start - shift, rows.stop - shift))


@rule(_aten.constant_pad_nd.default)
def pad_rule(call: RegionCall) -> ChunkedCall:
    """`constant_pad_nd`: by rows, if it pads other dims only."""
    source, padding = call.args[0], call.args[1]
    rows, num_dims = call.known_rows(source), len(call.shape)
    call.require_other_dims(
        rows, [num_dims - 1 - place // 2 for place, width in enumerate(padding) if width], num_dims
    )
    return call.result(rows)


@rule(_aten.cat.default)
def cat_rule(call: RegionCall) -> ChunkedCall:
    """`cat`: by rows, if all operands have the same rows and it joins them along another dim."""
    operands, dim = call.args[0], call.option(1, 0)
    rows = call.rows_of_any(operands)
    call.require_other_dims(rows, [dim], len(call.shape))
    slices: dict[fx.Node, Rows] = {}
    for operand in operands:
        call.require_rows(operand, rows, slices)
    return call.result(rows, slices=slices)


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
    return call.result(
        rows, args=(source, chunk_shape(call.shape, rows, CHUNK_ROWS), *call.args[2:])
    )


# --- reductions, softmax --------------------------------------------------------------------------


def _reduced(call: RegionCall, dims: Sequence[int], keeps_dims: bool) -> Rows:
    """Returns the rows of the result of a reduction. Refuses a reduction over the rows."""
    rows, num_dims = call.known_rows(call.args[0]), len(shape_of(call.args[0]))
    call.require_other_dims(rows, dims, num_dims)
    shift = 0 if keeps_dims else sum(dim % num_dims < rows.start for dim in dims)
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
        return call.result(_reduced(call, dims, _keeps_dims(call)))
    if prod(shape_of(source)[dim] for dim in across) != call.num_rows:
        raise call.refuse("adds up some of the rows' dims only")
    return call.result(PARTIAL)


@rule(_aten.mean.dim, _aten.mean.default)
def mean_rule(call: RegionCall) -> ChunkedCall:
    """`mean`: as `sum_rule`. A partial mean is a partial sum divided by the number of elements."""
    chunked_call = sum_rule(call)
    if chunked_call.forms[0] is not PARTIAL:
        return chunked_call
    dims = _dims_of(call)
    args = (call.args[0], dims, _keeps_dims(call))
    return call.result(
        PARTIAL,
        target=_aten.sum.dim_IntList,
        args=args,
        divisor=prod(shape_of(call.args[0])[dim] for dim in dims),
    )


def _keeps_dims(call: RegionCall) -> bool:
    return bool(call.option(2, False))


@rule(
    _aten.amax.default, _aten.amin.default, _aten.logsumexp.default, _aten.any.dim,
    _aten.argmax.default,
)  # fmt: skip
def reduction_rule(call: RegionCall) -> ChunkedCall:
    """Reductions (operand, dims, keepdim): by rows, if they reduce other dims only."""
    return call.result(_reduced(call, _dims_of(call), _keeps_dims(call)))


@rule(_aten.max.dim, _aten.min.dim)
def reduction_with_indices_rule(call: RegionCall) -> ChunkedCall:
    """`max.dim`, `min.dim`: both results by rows, as `reduction_rule`."""
    rows = _reduced(call, _dims_of(call), _keeps_dims(call))
    return ChunkedCall(forms=(rows, rows))


@rule(_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)
def softmax_backward_rule(call: RegionCall) -> ChunkedCall:
    """Gradients of softmax: by rows, if gradient and output have the same rows."""
    gradient, output, dim, _ = call.args
    rows = call.rows_of_any((gradient, output))
    slices: dict[fx.Node, Rows] = {}
    call.require_rows(gradient, rows, slices)
    call.require_rows(output, rows, slices)
    call.require_other_dims(rows, [dim], len(call.shape))
    return call.result(rows, slices=slices)


@rule(_aten.gather.default, _aten.scatter.value, _aten.scatter.src, _aten.scatter_add.default)
def indexed_rule(call: RegionCall) -> ChunkedCall:
    """`gather`, `scatter`, `scatter_add`: by rows shared by all tensors, along another dim."""
    operands = tensors_in(call.args)
    rows = call.rows_of_any(operands)
    slices: dict[fx.Node, Rows] = {}
    for operand in operands:
        if shape_of(operand) or call.rows(operand):
            call.require_rows(operand, rows, slices)
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
    rows = call.rows_of_any((gradient, source))
    slices: dict[fx.Node, Rows] = {}
    for operand in (gradient, source, mean, deviation):
        call.require_rows(operand, rows, slices)
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
    batch = call.rows_of_any((left, right))
    if batch.stop > num_dims - 2:
        raise call.refuse("has the rows in a batch dim and a matrix dim")
    call.require_rows(left, batch, slices)
    call.require_rows(right, batch, slices)
    return batch, slices


@rule(_aten.mm.default, _aten.bmm.default)
def matrix_product_rule(call: RegionCall) -> ChunkedCall:
    """`mm`, `bmm`: by rows, if they run along a dim of the result, partial along the summed dim."""
    form, slices = _product_form(call, *call.args)
    return call.result(form, slices=slices)


@rule(_aten.addmm.default, _aten.baddbmm.default)
def product_and_sum_rule(call: RegionCall) -> ChunkedCall:
    """`addmm`, `baddbmm`: by rows as `matrix_product_rule`. A partial product is refused."""
    value, left, right = call.args
    form, slices = _product_form(call, left, right)
    if not isinstance(form, Rows):
        raise call.refuse("adds a value to a product that sums over the rows")
    shift = len(call.shape) - len(shape_of(value))
    start, stop = max(0, form.start - shift), max(0, form.stop - shift)
    across = prod(shape_of(value)[start:stop])
    if across == call.num_rows:
        call.require_rows(value, Rows(start, stop), slices)
    elif across != 1 or call.rows(value):
        raise call.refuse(f"broadcasts {value.name} along a part of the rows")
    return call.result(form, slices=slices)
