"""Rules of views, and of ops that select, split and join. `rules` defines forms and rules."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from rockmate.graph.chunking.forms import (
    ChunkedCall,
    RegionCall,
    Rows,
    rows_within,
    shape_of,
    tensors_in,
)
from rockmate.graph.chunking.rules import rule

_aten = torch.ops.aten


def _moved(call: RegionCall, operand: fx.Node, kept: Sequence[int | None]) -> Rows:
    """Returns the rows of the result, from the operand's dim of each of its dims.

    None is an added dim. Rows whose dims are removed or taken apart are refused.
    """
    rows, num_dims = call.known_rows(operand), len(shape_of(operand))
    call.require_other_dims(rows, {*range(num_dims)} - {*kept}, num_dims)
    places = [kept.index(dim) for dim in range(rows.start, rows.stop)]
    if places != list(range(places[0], places[0] + len(places))):
        raise call.refuse("takes the dims of the rows apart")
    return Rows(places[0], places[-1] + 1)


def _others(call: RegionCall, *dims: int) -> list[int]:
    """Returns all dims of the first operand but some."""
    num_dims = len(shape_of(call.args[0]))
    return [dim for dim in range(num_dims) if dim not in {each % num_dims for each in dims}]


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


@rule(_aten.t.default, _aten.transpose.int, _aten.permute.default)
def permute_rule(call: RegionCall) -> ChunkedCall:
    """`t`, `transpose`, `permute`: by rows, if their dims stay adjacent and in order."""
    order = list(range(len(call.shape)))
    if call.node.target is _aten.permute.default:
        order = [order[dim] for dim in call.args[1]]
    elif order:
        first, second = call.args[1:] or (0, -1)
        order[first], order[second] = order[second], order[first]
    return call.result(_moved(call, call.args[0], order))


@rule(_aten.expand.default)
def expand_rule(call: RegionCall) -> ChunkedCall:
    """`expand`: by rows, shifted by the leading dims that it adds."""
    source, shape = call.args[0], call.shape
    rows, shift = call.known_rows(source), len(shape) - len(shape_of(source))
    moved = Rows(rows.start + shift, rows.stop + shift)
    return call.result(moved, args=(source, call.chunk_shape(shape, moved), *call.args[2:]))


@rule(_aten.unsqueeze.default, _aten.stack.default)
def added_dim_rule(call: RegionCall) -> ChunkedCall:
    """`unsqueeze`, `stack`: by rows, if the added dim is not between dims of the rows."""
    operands = tensors_in(call.args[:1])
    kept: list[int | None] = [*range(len(call.shape) - 1)]
    kept.insert(call.option(1, 0) % len(call.shape), None)
    _, slices = call.rows_of_all(operands)
    known = next(operand for operand in operands if call.rows(operand))
    return call.result(_moved(call, known, kept), slices=slices)


@rule(_aten.squeeze.dim, _aten.squeeze.dims)
def squeeze_rule(call: RegionCall) -> ChunkedCall:
    """`squeeze`: by rows, if it removes other dims.

    The call on a chunk names the removed dims, because a chunk may have a single row.
    """
    source, shape = call.args[0], shape_of(call.args[0])
    dims = call.args[1] if isinstance(call.args[1], tuple | list) else [call.args[1]]
    gone = sorted({dim % len(shape) for dim in dims if shape[dim] == 1})
    rows = _moved(call, source, _others(call, *gone))
    return call.result(rows, args=(source, gone), target=_aten.squeeze.dims)


@rule(_aten.select.int, _aten.unbind.int)
def removed_dim_rule(call: RegionCall) -> ChunkedCall:
    """`select`, `unbind`: every result by rows, if it removes another dim."""
    rows = _moved(call, call.args[0], _others(call, call.option(1, 0)))
    results = call.node.meta["val"]
    return ChunkedCall(forms=(rows,) * (len(results) if isinstance(results, tuple | list) else 1))


@rule(_aten.select_backward.default)
def select_backward_rule(call: RegionCall) -> ChunkedCall:
    """Gradient of `select`: by rows, shifted by the dim that it adds, if that is another one."""
    source, sizes, dim, index = call.args
    kept: list[int | None] = [*range(len(sizes) - 1)]
    kept.insert(dim % len(sizes), None)
    rows = _moved(call, source, kept)
    return call.result(rows, args=(source, call.chunk_shape(sizes, rows), dim, index))


@rule(_aten.slice.Tensor, _aten.slice_backward.default)
def slice_rule(call: RegionCall) -> ChunkedCall:
    """`slice` and its gradient: by rows, along another dim or if it takes the region's rows.

    Rows outside the region then have gradients of zero.
    """
    source, *given = call.args
    is_gradient = call.node.target is _aten.slice_backward.default
    sizes = given.pop(0) if is_gradient else shape_of(source)
    defaults: list[Any] = [0, None, None, 1]
    dim, *cut = given + defaults[len(given) :]
    rows, dim = call.known_rows(source), dim % len(sizes)
    if rows == Rows(dim, dim + 1) and call.space.is_cut(sizes[dim], *cut):
        return call.result(rows, target=_aten.alias.default, args=(source,))
    call.require_other_dims(rows, [dim], len(sizes))
    sized = (source, call.chunk_shape(sizes, rows), dim, *cut)
    return call.result(rows, args=sized if is_gradient else None)


@rule(_aten.split.Tensor, _aten.split_with_sizes.default)
def split_rule(call: RegionCall) -> ChunkedCall:
    """`split`: every result by rows, if it splits another dim."""
    rows = call.known_rows(call.args[0])
    call.require_other_dims(rows, [call.option(2, 0)], len(shape_of(call.args[0])))
    return ChunkedCall(forms=(rows,) * len(call.node.meta["val"]))


@rule(_aten.constant_pad_nd.default)
def pad_rule(call: RegionCall) -> ChunkedCall:
    """`constant_pad_nd`: by rows, if it pads other dims only."""
    padding, num_dims = call.args[1], len(call.shape)
    rows, padded = call.known_rows(call.args[0]), [i // 2 for i, n in enumerate(padding) if n]
    call.require_other_dims(rows, [num_dims - 1 - place for place in padded], num_dims)
    return call.result(rows)


@rule(_aten.cat.default)
def cat_rule(call: RegionCall) -> ChunkedCall:
    """`cat`: by rows, if all operands have the same rows and it joins them along another dim."""
    rows, slices = call.rows_of_all(call.args[0])
    call.require_other_dims(rows, [call.option(1, 0)], len(call.shape))
    return call.result(rows, slices=slices)
