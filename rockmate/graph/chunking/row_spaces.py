"""The rows that the region of a matrix product may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import calls_in
from rockmate.capture.roles import Capture
from rockmate.graph.chunking.forms import (
    PARTIAL,
    ChunkedCall,
    InseparableError,
    Rows,
    RowSpace,
    rows_within,
    shape_of,
)
from rockmate.graph.chunking.linearity import is_linear
from rockmate.graph.rewrite import forward_nodes

_aten = torch.ops.aten
# Matrix products -> the position of the left operand. The result has its rows.
PRODUCTS: dict[Any, int] = {
    _aten.mm.default: 0,
    _aten.addmm.default: 1,
    _aten.bmm.default: 0,
    _aten.baddbmm.default: 1,
}
_BATCHED = {_aten.bmm.default, _aten.baddbmm.default}
VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.t.default}


class Halves:
    """The calls of a joint graph, partitioned into forward and backward."""

    def __init__(self, capture: Capture) -> None:
        calls = frozenset(calls_in(capture.joint.graph))
        self.forward = calls & forward_nodes(capture)
        self.backward = calls - self.forward


def numel(node: fx.Node) -> int:
    """Returns the number of elements of a value. 0 if it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


class Large:
    """The large values of a region.

    They have at least half as many elements as its first product, and more than its operand. Of a
    batch that is taken apart, so have the samples: their rows are as wide as the product's.
    """

    def __init__(self, product: fx.Node, operand: fx.Node, space: RowSpace) -> None:
        of_product, of_operand = numel(product), numel(operand)
        least = max(of_product / 2, of_operand + 1 if of_product > of_operand else 0)
        self.min_elements = int(least * space.num_rows / max(1, space.size or space.num_rows))
        self._width = shape_of(product)[-1] if space.num_copies > 1 else 0

    def __contains__(self, node: fx.Node) -> bool:
        is_sample = numel(node) > self._width > 0 and shape_of(node)[-1] == self._width
        return is_sample or numel(node) >= self.min_elements


def rows_of_product(
    product: fx.Node, operand: fx.Node, halves: Halves
) -> Iterator[tuple[Rows, RowSpace]]:
    """Returns the possible rows of a product.

    First all rows of its operand. If these are batch x tokens, then the tokens that slices of the
    result take, and all tokens.
    """
    flat = rows_of_operand(product, operand)
    for rows in flat:
        yield rows, RowSpace(prod(shape_of(operand)[rows.start : rows.stop]))
    cuts, copied = dict[RowSpace, None](), dict[RowSpace, None]()
    values = [product] if product.target not in _BATCHED else []
    for value in values:
        *batch, size = shape_of(value)[:-1]
        if batch:
            copied[RowSpace(size, prod(batch))] = None
        for user in value.users:
            if user.target is _aten.slice.Tensor and user.args[1] == len(batch):
                rows = range(size)[slice(*(*user.args[2:4], None, None)[:2])]
                cuts[RowSpace(len(rows), prod(batch), size, rows.start)] = None
            elif (
                user in halves.forward
                and user not in values
                and numel(user) == numel(product)
                and len(shape_of(user)) > 1  # a sum and a vector have no rows
                and shape_of(user)[-1] == shape_of(product)[-1]
            ):
                values.append(user)
    for space in (*cuts, *copied):
        # Dims of that many elements may run over all rows, or over copies of the region's.
        is_ambiguous = space.num_copies * space.num_rows == space.size
        if not is_ambiguous and (space.size or space.num_copies > 1):
            yield flat[0], space


def rows_of_operand(product: fx.Node, operand: fx.Node) -> list[Rows]:
    """Returns the possible rows of a product's operand: all dims but the last.

    The rows of a batched product may also be the middle dim alone, for example in experts.
    """
    shape = shape_of(operand)
    found = [rows_within(shape, 0, len(shape) - 1)]
    if product.target in _BATCHED and Rows(1, 2) not in found:
        found.append(Rows(1, 2))
    return found


def check_cut(chunked_calls: Mapping[fx.Node, ChunkedCall], space: RowSpace) -> None:
    """Checks that nothing but the region's rows counts for what leaves the region.

    Values with more rows are read by slices that take the region's rows, or are zero in all other
    rows: gradients that are linear in those of the slices.

    Raises:
        InseparableError: a call reads other rows.
    """
    if not space.size:
        return
    zero_elsewhere: set[fx.Node] = set()
    for node, call in chunked_calls.items():
        operands = node.all_input_nodes
        is_padded = node.target is _aten.slice_backward.default and call.target is not None
        if is_padded or (
            not zero_elsewhere.isdisjoint(operands) and is_linear(node, zero_elsewhere)
        ):
            zero_elsewhere.add(node)
            continue
        read = operands if PARTIAL in call.forms else []
        is_exit = any(user not in chunked_calls for user in node.users)
        for value in [*read, node] if is_exit else read:
            known = (
                chunked_calls[value].forms[0] if value in chunked_calls else call.slices.get(value)
            )
            shape = shape_of(value) if numel(value) and isinstance(known, Rows) else ()
            if isinstance(known, Rows) and space.has_more(prod(shape[known.start : known.stop])):
                raise InseparableError(node, "reads rows that a slice leaves out")
