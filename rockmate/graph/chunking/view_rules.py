"""Rules of views, and of ops that select, split and join. `rules` defines forms and rules."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from rockmate.graph.chunking.forms import ChunkedCall, RegionCall, Rows, rows_within, shape_of
from rockmate.graph.chunking.rules import rule

_aten = torch.ops.aten


@rule(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
def view_rule(call: RegionCall) -> ChunkedCall:
    """`view`, `reshape`: by rows, if adjacent dims of the result run over exactly the rows."""
    source, rows = call.args[0], call.known_rows(call.args[0])
    count, shape = prod(shape_of(source)[rows.start : rows.stop]), call.shape
    copies = call.space.copies(count)
    before = prod(shape_of(source)[: rows.start]) * copies
    for number in (1, call.space.num_copies):
        for start in range(len(shape)):
            if prod(shape[:start]) * number != before:
                continue
            for stop in range(start + 1, len(shape) + 1):
                if prod(shape[start:stop]) * copies == count * number:
                    found = rows_within(shape, start, stop)
                    return call.result(found, args=(source, call.chunk_shape(shape, found)))
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
    return call.result(moved, args=(source, call.chunk_shape(shape, moved), *call.args[2:]))


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


@rule(_aten.slice.Tensor)
def slice_rule(call: RegionCall) -> ChunkedCall:
    """`slice`: by rows, if it runs along another dim, or takes the rows of the region."""
    source, dim = call.args[0], call.option(1, 0) % len(call.shape)
    rows = call.known_rows(source)
    cut = call.option(2, None), call.option(3, None), call.option(4, 1)
    if rows == Rows(dim, dim + 1) and call.space.is_cut(shape_of(source)[dim], *cut):
        return call.result(rows, target=_aten.alias.default, args=(source,))
    call.require_other_dims(rows, [dim], len(call.shape))
    return call.result(rows)


@rule(_aten.slice_backward.default)
def slice_backward_rule(call: RegionCall) -> ChunkedCall:
    """`slice_backward`: as `slice_rule`. Rows outside the region have gradients of zero."""
    source, sizes, dim, *cut = call.args
    rows, dim = call.known_rows(source), dim % len(sizes)
    if rows == Rows(dim, dim + 1) and call.space.is_cut(sizes[dim], *cut):
        return call.result(rows, target=_aten.alias.default, args=(source,))
    call.require_other_dims(rows, [dim], len(sizes))
    return call.result(rows, args=(source, call.chunk_shape(sizes, rows), dim, *cut))


@rule(_aten.unbind.int)
def unbind_rule(call: RegionCall) -> ChunkedCall:
    """`unbind`: every result by rows, if it removes another dim."""
    rows, num_dims = call.known_rows(call.args[0]), len(shape_of(call.args[0]))
    dim = call.option(1, 0) % num_dims
    call.require_other_dims(rows, [dim], num_dims)
    shift = int(dim < rows.start)
    moved = Rows(rows.start - shift, rows.stop - shift)
    return ChunkedCall(forms=(moved,) * len(call.node.meta["val"]))


@rule(_aten.stack.default)
def stack_rule(call: RegionCall) -> ChunkedCall:
    """`stack`: by rows, if all operands have the same rows and none is between their dims."""
    operands, dim = call.args[0], call.option(1, 0) % len(call.shape)
    rows = call.rows_of_any(operands)
    if rows.start < dim < rows.stop:
        raise call.refuse("takes the dims of the rows apart")
    slices: dict[fx.Node, Rows] = {}
    for operand in operands:
        call.require_rows(operand, rows, slices)
    shift = int(dim <= rows.start)
    return call.result(Rows(rows.start + shift, rows.stop + shift), slices=slices)


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
