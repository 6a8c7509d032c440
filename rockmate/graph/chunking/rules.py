"""Rules for running a call on some rows of its operands at a time: the analysis behind chunks.

A region of the graph is separated along its *rows*: tokens, or samples. Each value has one of three
forms:

- `Rows(start, stop)`: dims `start` to `stop` - 1 together run over the rows, in order; one dim, or
  batch x tokens side by side. A chunk's value has the chunk's rows, as dims 1 x ... x 1 x rows.
- *whole*: the value is the same for every chunk, as weights and counts are.
- *partial*: the value is a sum over the rows, and the chunks' results add up to it, as for a loss
  or the gradient of a weight.

The rule of a call gives the form of its result from the forms of its operands, and the call on one
chunk. An operand from outside the region has no form. If a rule needs its rows, it is sliced, which
is exact; otherwise it is whole. A call without a rule, or one that mixes rows, makes the region
inseparable, and the error names it.

docs/internals/algorithms.md has the rules as equations and proves that chunks give the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from rockmate.graph.chunking.forms import (
    CHUNK_ROWS,
    PARTIAL,
    Form,
    Piece,
    RegionCall,
    Rows,
    chunk_shape,
    rows_within,
    shape_of,
    tensors_in,
)

_aten = torch.ops.aten


# --- elementwise ----------------------------------------------------------------------------------


def elementwise_rule(call: RegionCall) -> Piece:
    """Operands broadcast against each other, aligned at the last dim."""
    rows, slices = broadcast_rows(call, call.shape)
    return call.result(rows, slices=slices)


def broadcast_rows(call: RegionCall, shape: Sequence[int]) -> tuple[Rows, dict[fx.Node, Rows]]:
    """The rows of operands that are broadcast to a shape, and those of the sliced operands."""
    operands = tensors_in(call.node.all_input_nodes)
    shifts = {operand: len(shape) - len(shape_of(operand)) for operand in operands}
    found = {
        Rows(rows.start + shifts[operand], rows.stop + shifts[operand])
        for operand in operands
        if (rows := call.rows(operand)) is not None
    }
    if len(found) != 1:
        raise call.refuse(
            "reads its operands' rows in different places" if found else "reads nothing by rows"
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


def view_rule(call: RegionCall) -> Piece:
    """`view`, `reshape`: dims of the result that together run over exactly the rows."""
    source, rows = call.args[0], call.only(call.args[0])
    before, shape = prod(shape_of(source)[: rows.start]), call.shape
    for start in range(len(shape)):
        if prod(shape[:start]) != before:
            continue
        for stop in range(start + 1, len(shape) + 1):
            if prod(shape[start:stop]) == call.num_rows:
                found = rows_within(shape, start, stop)
                return call.result(found, args=(source, chunk_shape(shape, found, CHUNK_ROWS)))
    raise call.refuse("merges the rows with another dim")


def _moved(call: RegionCall, order: Sequence[int]) -> Piece:
    """A permutation: dim `order[i]` of the operand becomes dim i."""
    rows = call.only(call.args[0])
    places = [order.index(dim) for dim in range(rows.start, rows.stop)]
    if places != list(range(places[0], places[0] + len(places))):
        raise call.refuse("takes the dims of the rows apart")
    return call.result(Rows(places[0], places[-1] + 1))


def transpose_rule(call: RegionCall) -> Piece:
    """`t`, `transpose`: see `_moved`."""
    order = list(range(len(call.shape)))
    first, second = (call.args[1], call.args[2]) if len(call.args) > 1 else (0, -1)
    if order:
        order[first], order[second] = order[second], order[first]
    return _moved(call, order)


def permute_rule(call: RegionCall) -> Piece:
    """`permute`: see `_moved`."""
    return _moved(call, [dim % len(call.shape) for dim in call.args[1]])


def expand_rule(call: RegionCall) -> Piece:
    """`expand`: leading dims shift the rows."""
    source, shape = call.args[0], call.shape
    rows, shift = call.only(source), len(shape) - len(shape_of(source))
    moved = Rows(rows.start + shift, rows.stop + shift)
    return call.result(moved, args=(source, chunk_shape(shape, moved, CHUNK_ROWS), *call.args[2:]))


def unsqueeze_rule(call: RegionCall) -> Piece:
    """`unsqueeze`: a dim before or after the rows, not between them."""
    rows, dim = call.only(call.args[0]), call.args[1] % len(call.shape)
    if rows.start < dim < rows.stop:
        raise call.refuse("takes the dims of the rows apart")
    shift = int(dim <= rows.start)
    return call.result(Rows(rows.start + shift, rows.stop + shift))


def squeeze_rule(call: RegionCall) -> Piece:
    """`squeeze`: dims other than those of the rows, by number, since a chunk may have one row."""
    source = call.args[0]
    rows, shape = call.only(source), shape_of(source)
    dims = call.args[1] if isinstance(call.args[1], tuple | list) else [call.args[1]]
    gone = {dim % len(shape) for dim in dims if shape[dim] == 1}
    call.outside_dims(rows, gone, len(shape))
    shift = sum(dim < rows.start for dim in gone)
    return call.result(
        Rows(rows.start - shift, rows.stop - shift),
        args=(source, sorted(gone)),
        target=_aten.squeeze.dims,
    )


def along_another_dim_rule(call: RegionCall) -> Piece:
    """A call (operand, dim, ...) along a dim other than the rows'; rows stay where they are."""
    rows = call.only(call.args[0])
    call.outside_dims(rows, [call.option(1, 0)], len(shape_of(call.args[0])))
    return call.result(rows)


def split_rule(call: RegionCall) -> Piece:
    """`split`: several results along another dim."""
    rows = call.only(call.args[0])
    call.outside_dims(rows, [call.option(2, 0)], len(shape_of(call.args[0])))
    return Piece(forms=(rows,) * len(call.node.meta["val"]))


def select_rule(call: RegionCall) -> Piece:
    """`select`: one index of another dim."""
    rows, dim = call.only(call.args[0]), call.args[1] % len(shape_of(call.args[0]))
    call.outside_dims(rows, [dim], len(shape_of(call.args[0])))
    shift = int(dim < rows.start)
    return call.result(Rows(rows.start - shift, rows.stop - shift))


def pad_rule(call: RegionCall) -> Piece:
    """`constant_pad_nd`: padding of other dims."""
    source, padding = call.args[0], call.args[1]
    rows, num_dims = call.only(source), len(call.shape)
    call.outside_dims(
        rows, [num_dims - 1 - place // 2 for place, width in enumerate(padding) if width], num_dims
    )
    return call.result(rows)


def cat_rule(call: RegionCall) -> Piece:
    """`cat`: along another dim, of operands with the same rows."""
    operands, dim = call.args[0], call.option(1, 0)
    rows = next((rows for operand in operands if (rows := call.rows(operand)) is not None), None)
    if rows is None:
        raise call.refuse("reads nothing by rows")
    call.outside_dims(rows, [dim], len(call.shape))
    slices: dict[fx.Node, Rows] = {}
    for operand in operands:
        call.at(operand, rows, slices)
    return call.result(rows, slices=slices)


# --- constants of a value's shape -----------------------------------------------------------------


def like_rule(call: RegionCall) -> Piece:
    """`zeros_like` and others: the rows of the operand."""
    return call.result(call.only(call.args[0]))


def new_rule(call: RegionCall) -> Piece:
    """`new_zeros` and others: the rows of the operand, if the shape is the operand's."""
    source, rows = call.args[0], call.only(call.args[0])
    if shape_of(source) != call.shape:
        raise call.refuse("makes a tensor of another shape")
    return call.result(
        rows, args=(source, chunk_shape(call.shape, rows, CHUNK_ROWS), *call.args[2:])
    )


# --- reductions, softmax --------------------------------------------------------------------------


def _reduced(call: RegionCall, dims: Sequence[int], keeps_dims: bool) -> Rows:
    """The rows of the result of a reduction over other dims."""
    rows, num_dims = call.only(call.args[0]), len(shape_of(call.args[0]))
    call.outside_dims(rows, dims, num_dims)
    shift = 0 if keeps_dims else sum(dim % num_dims < rows.start for dim in dims)
    return Rows(rows.start - shift, rows.stop - shift)


def _dims_of(call: RegionCall) -> list[int]:
    """The dims of a reduction; all of them if it names none."""
    named = call.option(1, None)
    num_dims = len(shape_of(call.args[0]))
    dims = [] if named is None else named if isinstance(named, tuple | list) else [named]
    return [dim % num_dims for dim in dims] or list(range(num_dims))


def sum_rule(call: RegionCall) -> Piece:
    """`sum`: by rows over other dims, partial over all dims of the rows."""
    source = call.args[0]
    rows, dims = call.only(source), _dims_of(call)
    across = [dim for dim in dims if rows.start <= dim < rows.stop]
    if not across:
        return call.result(_reduced(call, dims, _keeps_dims(call)))
    if prod(shape_of(source)[dim] for dim in across) != call.num_rows:
        raise call.refuse("adds up some of the rows' dims only")
    return call.result(PARTIAL)


def mean_rule(call: RegionCall) -> Piece:
    """`mean`: as `sum_rule`; a partial one is a sum, divided by the number of elements."""
    piece = sum_rule(call)
    if piece.forms[0] is not PARTIAL:
        return piece
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


def reduction_rule(call: RegionCall) -> Piece:
    """A reduction (operand, dims, keepdim) over other dims."""
    return call.result(_reduced(call, _dims_of(call), _keeps_dims(call)))


def reduction_with_indices_rule(call: RegionCall) -> Piece:
    """`max.dim`, `min.dim`: as `reduction_rule`, with two results."""
    rows = _reduced(call, _dims_of(call), _keeps_dims(call))
    return Piece(forms=(rows, rows))


def softmax_rule(call: RegionCall) -> Piece:
    """`_softmax`, `_log_softmax`: along another dim."""
    return along_another_dim_rule(call)


def softmax_backward_rule(call: RegionCall) -> Piece:
    """The gradient of a softmax: gradient and result by the same rows."""
    gradient, output, dim, _ = call.args
    rows = call.rows(gradient) or call.rows(output)
    if rows is None:
        raise call.refuse("reads nothing by rows")
    slices: dict[fx.Node, Rows] = {}
    call.at(gradient, rows, slices)
    call.at(output, rows, slices)
    call.outside_dims(rows, [dim], len(call.shape))
    return call.result(rows, slices=slices)


def indexed_rule(call: RegionCall) -> Piece:
    """`gather`, `scatter`, `scatter_add`: all tensors by the same rows, along another dim."""
    operands = tensors_in(call.args)
    rows = next((rows for operand in operands if (rows := call.rows(operand)) is not None), None)
    if rows is None:
        raise call.refuse("reads nothing by rows")
    slices: dict[fx.Node, Rows] = {}
    for operand in operands:
        if shape_of(operand) or call.rows(operand):
            call.at(operand, rows, slices)
    call.outside_dims(rows, [call.args[1]], len(call.shape))
    return call.result(rows, slices=slices)


# --- normalization --------------------------------------------------------------------------------


def layer_norm_rule(call: RegionCall) -> Piece:
    """`native_layer_norm`: over other dims; the result and both statistics by rows."""
    rows, num_dims = call.only(call.args[0]), len(shape_of(call.args[0]))
    call.outside_dims(rows, range(num_dims - len(call.args[1]), num_dims), num_dims)
    call.must_be_whole(*call.args[2:4])
    return Piece(forms=(rows, rows, rows))


def layer_norm_backward_rule(call: RegionCall) -> Piece:
    """`native_layer_norm_backward`: input gradient by rows, weight and bias gradient partial."""
    gradient, source, normalized, mean, deviation, weight, bias, _ = call.args
    rows = call.rows(gradient) or call.rows(source)
    if rows is None:
        raise call.refuse("reads nothing by rows")
    slices: dict[fx.Node, Rows] = {}
    for operand in (gradient, source, mean, deviation):
        call.at(operand, rows, slices)
    num_dims = len(shape_of(source))
    call.outside_dims(rows, range(num_dims - len(normalized), num_dims), num_dims)
    call.must_be_whole(weight, bias)
    return Piece(forms=(rows, PARTIAL, PARTIAL), slices=slices)


# --- matrix products ------------------------------------------------------------------------------


def _product(call: RegionCall, left: fx.Node, right: fx.Node) -> tuple[Form, dict[fx.Node, Rows]]:
    """The form of a matrix product (..., i, k) x (..., k, j), and the sliced operands.

    Rows along i, j or a batch dim stay. Rows along k make the product partial.
    """
    num_dims = len(call.shape)
    slices: dict[fx.Node, Rows] = {}
    row, column = Rows(num_dims - 2, num_dims - 1), Rows(num_dims - 1, num_dims)
    of_left, of_right = call.rows(left), call.rows(right)
    if of_left == row:
        call.must_be_whole(right)
        return row, slices
    if of_right == column:
        call.must_be_whole(left)
        return column, slices
    if of_left == column or of_right == row:
        call.at(left, column, slices)
        call.at(right, row, slices)
        return PARTIAL, slices
    batch = of_left or of_right
    if batch is None or batch.stop > num_dims - 2:
        raise call.refuse(
            "reads nothing by rows" if batch is None else "takes rows together with another dim"
        )
    call.at(left, batch, slices)
    call.at(right, batch, slices)
    return batch, slices


def matrix_product_rule(call: RegionCall) -> Piece:
    """`mm`, `bmm`: see `_product`."""
    form, slices = _product(call, *call.args)
    return call.result(form, slices=slices)


def product_and_sum_rule(call: RegionCall) -> Piece:
    """`addmm`, `baddbmm`: a broadcast value plus a product, which must not be partial."""
    value, left, right = call.args
    form, slices = _product(call, left, right)
    if not isinstance(form, Rows):
        raise call.refuse("adds a value to a product that sums over the rows")
    shift = len(call.shape) - len(shape_of(value))
    start, stop = max(0, form.start - shift), max(0, form.stop - shift)
    across = prod(shape_of(value)[start:stop])
    if across == call.num_rows:
        call.at(value, Rows(start, stop), slices)
    elif across != 1 or call.rows(value):
        raise call.refuse(f"broadcasts {value.name} along a part of the rows")
    return call.result(form, slices=slices)
