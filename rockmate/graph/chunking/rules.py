"""Which calls of a joint graph can run on some rows of their operands at a time, and how: the analysis behind chunked execution.

*Rows* are what a region of the graph is taken apart along: tokens, or samples. Seen from them, each value has one of three forms:

* `Rows(start, stop)`: dims `start` to `stop` - 1 together run over the rows, in order (one dim, or batch x tokens side by side). The
  value of a chunk is the part of those rows, with the dims taken to 1 x ... x 1 x rows of the chunk;
* *whole*: the same for every chunk (weights, counts);
* *partial*: a sum over the rows. The chunks' results add up to it (a loss, the gradient of a weight).

A rule for each kind of call says what form its result has, given those of its operands, and how the call reads on one chunk. What
enters the region from outside has no form of its own: where a rule needs it by rows it is sliced, which is always exact, and elsewhere
it is taken as it is. A call without a rule, or one that mixes rows, makes the region inseparable, and the reason names it.
docs/internals/algorithms.md states the rules as equations and proves that the chunks give the same result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from rockmate._torch.ops import is_op, schema_of
from rockmate.capture.nodes import call_name
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply
from rockmate.ops.rng import is_random

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rows:
    """Dims `start` to `stop` - 1 run over the rows; none of size 1 stands at either end."""

    start: int
    stop: int


class Whole:
    """The same for every chunk."""


class Partial:
    """A sum over the rows, to which the chunks' results add up."""


class ChunkRows:
    """Stands in a call's arguments for the number of rows of the chunk."""


WHOLE, PARTIAL, CHUNK_ROWS = Whole(), Partial(), ChunkRows()
Form = Rows | Whole | Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """How a call runs on one chunk.

    Attributes:
        forms: of its result, or of each result if it makes several; None for a result that nobody may read.
        slices: which operands from outside the region are taken by rows; all others are taken as they are.
        target: what is called instead, None for the call's own target.
        args: its arguments instead, with `CHUNK_ROWS` for the number of rows of the chunk; None for its own.
        divisor: by which the result is divided.
    """

    forms: tuple[Form | None, ...]
    slices: Mapping[fx.Node, Rows] = field(default_factory=dict)
    target: Any = None
    args: tuple[Any, ...] | None = None
    divisor: int = 1


class InseparableError(Exception):
    """A region cannot run in chunks; carries the call and the reason."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        self.call = f"{call_name(node)} ({node.name})"
        super().__init__(f"{self.call} {reason}")
        self.node = node
        self.reason = reason


def separate(
    nodes: Sequence[fx.Node],
    given: Mapping[fx.Node, Rows],
    num_rows: int,
    *,
    joined: Collection[fx.Node] = (),
) -> dict[fx.Node, Piece]:
    """How each call of a region runs on one chunk.

    Args:
        nodes: the calls of the region, in graph order.
        given: the form of values from outside that it is taken apart along.
        num_rows: how many rows there are.
        joined: calls of the region that run when the sums that other calls of it make over all rows are there, so may read those (the
            calls of the backward, which run after all chunks of the forward).

    Raises:
        InseparableError: a call has no rule, or mixes rows.
    """
    forms: dict[fx.Node, Form] = dict(given)
    pieces: dict[fx.Node, Piece] = {}
    region = set(nodes)
    for node in nodes:
        add_piece(node, pieces, forms, region, num_rows, joined)
    return pieces


def add_piece(
    node: fx.Node,
    pieces: dict[fx.Node, Piece],
    forms: dict[fx.Node, Form],
    region: Collection[fx.Node],
    num_rows: int,
    joined: Collection[fx.Node],
) -> None:
    """Adds how one more call of a region runs on a chunk, and the form of its result."""
    call = _Call(node, forms, region, num_rows, joined)
    piece = pieces[node] = (
        call.getitem(pieces) if node.target is operator.getitem else _rule(node)(call)
    )
    if len(piece.forms) == 1 and piece.forms[0] is not None:
        forms[node] = piece.forms[0]


def rows_within(shape: Sequence[int], start: int, stop: int) -> Rows:
    """Those dims without the ones of size 1 at either end."""
    while stop - start > 1 and shape[start] == 1:
        start += 1
    while stop - start > 1 and shape[stop - 1] == 1:
        stop -= 1
    return Rows(start, stop)


def chunk_shape(shape: Sequence[int], rows: Rows, size: Any) -> list[Any]:
    """The shape of the part of a value that belongs to one chunk."""
    return [*shape[: rows.start], *[1] * (rows.stop - rows.start - 1), size, *shape[rows.stop :]]


@dataclass(frozen=True)
class _Call:
    """One call of the region, as its rule sees it."""

    node: fx.Node
    forms: Mapping[fx.Node, Form]
    region: Collection[fx.Node]
    num_rows: int
    joined: Collection[fx.Node]

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    def option(self, position: int, default: Any) -> Any:
        """An argument that may be left out."""
        return self.args[position] if len(self.args) > position else default

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return tuple(self.node.meta["val"].shape)

    def refuse(self, reason: str) -> InseparableError:
        return InseparableError(self.node, reason)

    def form(self, operand: Any) -> Form | None:
        """The form of an operand; None for one from outside, which can be taken by rows or whole."""
        if not isinstance(operand, fx.Node):
            return None
        form = self.forms.get(operand)
        if form is PARTIAL:
            if self.node not in self.joined or operand in self.joined:
                raise self.refuse(
                    f"reads {operand.name}, a sum over all rows, where only a part of them is known"
                )
            return None
        if form is None and operand in self.region:
            raise self.refuse(f"reads {operand.name}, which is a result that chunks cannot give")
        return form

    def rows(self, operand: Any) -> Rows | None:
        """The dims that run over the rows, None if the operand is whole or from outside."""
        form = self.form(operand)
        return form if isinstance(form, Rows) else None

    def is_outside(self, operand: Any) -> bool:
        """Whether it comes from outside the region and may be sliced."""
        return isinstance(operand, fx.Node) and self.form(operand) is None

    def must_be_whole(self, *operands: Any) -> None:
        for operand in operands:
            if self.rows(operand) is not None:
                raise self.refuse(f"combines rows of {operand.name} with each other")

    def at(self, operand: fx.Node, rows: Rows, slices: dict[fx.Node, Rows]) -> None:
        """Demands that an operand have its rows there: one from outside is sliced."""
        shape = _shape(operand)
        known = self.form(operand)
        if (
            known is None
            and rows.stop <= len(shape)
            and prod(shape[rows.start : rows.stop]) == self.num_rows
        ):
            wanted = rows_within(shape, rows.start, rows.stop)
            if slices.setdefault(operand, wanted) == wanted:
                return
        if known != rows:
            raise self.refuse(f"takes the rows of {operand.name} in another place")

    def only(self, operand: Any) -> Rows:
        """The rows of the one operand that must have them."""
        rows = self.rows(operand)
        if rows is None:
            raise self.refuse("runs over rows that its first operand does not have")
        return rows

    def result(self, rows: Form | None, **more: Any) -> Piece:
        return Piece(forms=(rows,), **more)

    def getitem(self, pieces: Mapping[fx.Node, Piece]) -> Piece:
        """One result of a call that makes several."""
        parent, index = self.args
        return Piece(forms=(pieces[parent].forms[index],))

    def outside_dims(self, rows: Rows, dims: Iterable[int], num_dims: int) -> None:
        """Demands that none of the dims run over the rows."""
        if any(rows.start <= dim % num_dims < rows.stop for dim in dims):
            raise self.refuse("runs along the rows")


_Rule = Callable[[_Call], Piece]


def _rule(node: fx.Node) -> _Rule:
    target = node.target
    found = _RULES.get(target)
    if found is not None:
        return found
    if is_elementwise(node):
        return _elementwise
    raise InseparableError(node, "has no rule for rows")


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of its result is made from the elements at the same place of its operands, broadcast."""
    target = node.target
    if not is_op(target):
        return _RULES.get(target) is _elementwise
    pointwise = (
        torch.Tag.pointwise in target.tags
        and not is_random(target)
        and len(schema_of(target).returns) == 1
    )
    return pointwise or _RULES.get(target) is _elementwise


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _tensors(values: Iterable[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    for value in values:
        found += (
            _tensors(value)
            if isinstance(value, tuple | list)
            else [value]
            if isinstance(value, fx.Node)
            else []
        )
    return found


# --- elementwise ---------------------------------------------------------------------------------------


def _elementwise(call: _Call) -> Piece:
    """Operands broadcast against each other, aligned at the last dim."""
    rows, slices = _broadcast(call, call.shape)
    return call.result(rows, slices=slices)


def _broadcast(call: _Call, shape: Sequence[int]) -> tuple[Rows, dict[fx.Node, Rows]]:
    """Where operands that broadcast to a shape have the rows there, and which of them are sliced."""
    operands = _tensors(call.node.all_input_nodes)
    shifts = {operand: len(shape) - len(_shape(operand)) for operand in operands}
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
            across = prod(_shape(operand)[start:stop])
            if across == call.num_rows and call.is_outside(operand):
                slices[operand] = rows_within(_shape(operand), start, stop)
            elif across != 1:
                raise call.refuse(f"broadcasts {operand.name} along a part of the rows")
    return rows, slices


# --- views ---------------------------------------------------------------------------------------------


def _view(call: _Call) -> Piece:
    source, rows = call.args[0], call.only(call.args[0])
    before, shape = prod(_shape(source)[: rows.start]), call.shape
    for start in range(len(shape)):
        if prod(shape[:start]) != before:
            continue
        for stop in range(start + 1, len(shape) + 1):
            if prod(shape[start:stop]) == call.num_rows:
                found = rows_within(shape, start, stop)
                return call.result(found, args=(source, chunk_shape(shape, found, CHUNK_ROWS)))
    raise call.refuse("merges the rows with another dim")


def _moved(call: _Call, order: Sequence[int]) -> Piece:
    """A permutation: dim `order[i]` of the operand becomes dim i."""
    rows = call.only(call.args[0])
    places = [order.index(dim) for dim in range(rows.start, rows.stop)]
    if places != list(range(places[0], places[0] + len(places))):
        raise call.refuse("takes the dims of the rows apart")
    return call.result(Rows(places[0], places[-1] + 1))


def _transpose(call: _Call) -> Piece:
    order = list(range(len(call.shape)))
    first, second = (call.args[1], call.args[2]) if len(call.args) > 1 else (0, -1)
    if order:
        order[first], order[second] = order[second], order[first]
    return _moved(call, order)


def _permute(call: _Call) -> Piece:
    return _moved(call, [dim % len(call.shape) for dim in call.args[1]])


def _expand(call: _Call) -> Piece:
    source, shape = call.args[0], call.shape
    rows, shift = call.only(source), len(shape) - len(_shape(source))
    moved = Rows(rows.start + shift, rows.stop + shift)
    return call.result(moved, args=(source, chunk_shape(shape, moved, CHUNK_ROWS), *call.args[2:]))


def _unsqueeze(call: _Call) -> Piece:
    rows, dim = call.only(call.args[0]), call.args[1] % len(call.shape)
    if rows.start < dim < rows.stop:
        raise call.refuse("takes the dims of the rows apart")
    shift = int(dim <= rows.start)
    return call.result(Rows(rows.start + shift, rows.stop + shift))


def _squeeze(call: _Call) -> Piece:
    source = call.args[0]
    rows, shape = call.only(source), _shape(source)
    dims = call.args[1] if isinstance(call.args[1], tuple | list) else [call.args[1]]
    gone = {dim % len(shape) for dim in dims if shape[dim] == 1}
    call.outside_dims(rows, gone, len(shape))
    shift = sum(dim < rows.start for dim in gone)
    return call.result(
        Rows(rows.start - shift, rows.stop - shift),
        args=(source, sorted(gone)),
        target=_aten.squeeze.dims,
    )


def _along_another_dim(call: _Call) -> Piece:
    """A call (operand, dim, ...) of which each row of the result comes from the same row of the operand."""
    rows = call.only(call.args[0])
    call.outside_dims(rows, [call.option(1, 0)], len(_shape(call.args[0])))
    return call.result(rows)


def _split(call: _Call) -> Piece:
    """A call (operand, sizes, dim) that makes several parts along another dim."""
    rows = call.only(call.args[0])
    call.outside_dims(rows, [call.option(2, 0)], len(_shape(call.args[0])))
    return Piece(forms=(rows,) * len(call.node.meta["val"]))


def _select(call: _Call) -> Piece:
    rows, dim = call.only(call.args[0]), call.args[1] % len(_shape(call.args[0]))
    call.outside_dims(rows, [dim], len(_shape(call.args[0])))
    shift = int(dim < rows.start)
    return call.result(Rows(rows.start - shift, rows.stop - shift))


def _pad(call: _Call) -> Piece:
    source, padding = call.args[0], call.args[1]
    rows, num_dims = call.only(source), len(call.shape)
    call.outside_dims(
        rows, [num_dims - 1 - place // 2 for place, width in enumerate(padding) if width], num_dims
    )
    return call.result(rows)


def _cat(call: _Call) -> Piece:
    operands, dim = call.args[0], call.option(1, 0)
    rows = next((rows for operand in operands if (rows := call.rows(operand)) is not None), None)
    if rows is None:
        raise call.refuse("reads nothing by rows")
    call.outside_dims(rows, [dim], len(call.shape))
    slices: dict[fx.Node, Rows] = {}
    for operand in operands:
        call.at(operand, rows, slices)
    return call.result(rows, slices=slices)


# --- what is made in a value's likeness ----------------------------------------------------------------


def _like(call: _Call) -> Piece:
    return call.result(call.only(call.args[0]))


def _new(call: _Call) -> Piece:
    source, rows = call.args[0], call.only(call.args[0])
    if _shape(source) != call.shape:
        raise call.refuse("makes a tensor of another shape")
    return call.result(
        rows, args=(source, chunk_shape(call.shape, rows, CHUNK_ROWS), *call.args[2:])
    )


# --- reductions, softmax -------------------------------------------------------------------------------


def _reduced(call: _Call, dims: Sequence[int], keeps_dims: bool) -> Rows:
    """The rows of what is reduced over other dims."""
    rows, num_dims = call.only(call.args[0]), len(_shape(call.args[0]))
    call.outside_dims(rows, dims, num_dims)
    shift = 0 if keeps_dims else sum(dim % num_dims < rows.start for dim in dims)
    return Rows(rows.start - shift, rows.stop - shift)


def _dims_of(call: _Call) -> list[int]:
    """Over which a reduction goes; all of them if it names none."""
    named = call.option(1, None)
    num_dims = len(_shape(call.args[0]))
    dims = [] if named is None else named if isinstance(named, tuple | list) else [named]
    return [dim % num_dims for dim in dims] or list(range(num_dims))


def _sum(call: _Call) -> Piece:
    source = call.args[0]
    rows, dims = call.only(source), _dims_of(call)
    across = [dim for dim in dims if rows.start <= dim < rows.stop]
    if not across:
        return call.result(_reduced(call, dims, _keeps_dims(call)))
    if prod(_shape(source)[dim] for dim in across) != call.num_rows:
        raise call.refuse("adds up some of the rows' dims only")
    return call.result(PARTIAL)


def _mean(call: _Call) -> Piece:
    piece = _sum(call)
    if piece.forms[0] is not PARTIAL:
        return piece
    dims = _dims_of(call)
    args = (call.args[0], dims, _keeps_dims(call))
    return call.result(
        PARTIAL,
        target=_aten.sum.dim_IntList,
        args=args,
        divisor=prod(_shape(call.args[0])[dim] for dim in dims),
    )


def _keeps_dims(call: _Call) -> bool:
    return bool(call.option(2, False))


def _reduction(call: _Call) -> Piece:
    return call.result(_reduced(call, _dims_of(call), _keeps_dims(call)))


def _reduction_with_indices(call: _Call) -> Piece:
    rows = _reduced(call, _dims_of(call), _keeps_dims(call))
    return Piece(forms=(rows, rows))


def _softmax(call: _Call) -> Piece:
    return _along_another_dim(call)


def _softmax_backward(call: _Call) -> Piece:
    gradient, output, dim, _ = call.args
    rows = call.rows(gradient) or call.rows(output)
    if rows is None:
        raise call.refuse("reads nothing by rows")
    slices: dict[fx.Node, Rows] = {}
    call.at(gradient, rows, slices)
    call.at(output, rows, slices)
    call.outside_dims(rows, [dim], len(call.shape))
    return call.result(rows, slices=slices)


def _indexed(call: _Call) -> Piece:
    """`gather`, `scatter`, `scatter_add`: (operand, dim, index, ...), all tensors by the same rows."""
    operands = _tensors(call.args)
    rows = next((rows for operand in operands if (rows := call.rows(operand)) is not None), None)
    if rows is None:
        raise call.refuse("reads nothing by rows")
    slices: dict[fx.Node, Rows] = {}
    for operand in operands:
        if _shape(operand) or call.rows(operand):
            call.at(operand, rows, slices)
    call.outside_dims(rows, [call.args[1]], len(call.shape))
    return call.result(rows, slices=slices)


# --- normalisation -------------------------------------------------------------------------------------


def _layer_norm(call: _Call) -> Piece:
    rows, num_dims = call.only(call.args[0]), len(_shape(call.args[0]))
    call.outside_dims(rows, range(num_dims - len(call.args[1]), num_dims), num_dims)
    call.must_be_whole(*call.args[2:4])
    return Piece(forms=(rows, rows, rows))


def _layer_norm_backward(call: _Call) -> Piece:
    gradient, source, normalized, mean, deviation, weight, bias, _ = call.args
    rows = call.rows(gradient) or call.rows(source)
    if rows is None:
        raise call.refuse("reads nothing by rows")
    slices: dict[fx.Node, Rows] = {}
    for operand in (gradient, source, mean, deviation):
        call.at(operand, rows, slices)
    num_dims = len(_shape(source))
    call.outside_dims(rows, range(num_dims - len(normalized), num_dims), num_dims)
    call.must_be_whole(weight, bias)
    return Piece(forms=(rows, PARTIAL, PARTIAL), slices=slices)


# --- products ------------------------------------------------------------------------------------------


def _product(call: _Call, left: fx.Node, right: fx.Node) -> tuple[Form, dict[fx.Node, Rows]]:
    """Form of a matrix product, possibly batched: (..., i, k) x (..., k, j)."""
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
    if of_left == column or of_right == row:  # both run over the rows, along which the product sums
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


def _matrix_product(call: _Call) -> Piece:
    form, slices = _product(call, *call.args)
    return call.result(form, slices=slices)


def _product_and_sum(call: _Call) -> Piece:
    """`addmm`, `baddbmm`: a value, broadcast, plus a product."""
    value, left, right = call.args
    form, slices = _product(call, left, right)
    if not isinstance(form, Rows):
        raise call.refuse("adds a value to a product that sums over the rows")
    shift = len(call.shape) - len(_shape(value))
    start, stop = max(0, form.start - shift), max(0, form.stop - shift)
    across = prod(_shape(value)[start:stop])
    if across == call.num_rows:
        call.at(value, Rows(start, stop), slices)
    elif across != 1 or call.rows(value):
        raise call.refuse(f"broadcasts {value.name} along a part of the rows")
    return call.result(form, slices=slices)


# --- the loss ------------------------------------------------------------------------------------------

_NONE, _MEAN = 0, 1  # ATen's numbers for reductions


def _nll_loss(call: _Call) -> Piece:
    scores, target, weight, reduction, _ = call.args
    rows, slices = call.only(scores), dict[fx.Node, Rows]()
    if rows != Rows(0, 1):
        raise call.refuse("takes classes along the rows")
    if reduction == _MEAN:
        raise call.refuse("divides by a count of all rows")
    call.at(target, rows, slices)
    call.must_be_whole(weight)
    return Piece(forms=(rows if reduction == _NONE else PARTIAL, PARTIAL), slices=slices)


def _nll_loss_backward(call: _Call) -> Piece:
    gradient, scores, target, weight, _, _, total_weight = call.args
    rows, slices = Rows(0, 1), dict[fx.Node, Rows]()
    call.at(scores, rows, slices)
    call.at(target, rows, slices)
    if _shape(gradient):
        call.at(gradient, rows, slices)
    call.must_be_whole(weight, total_weight)
    return call.result(rows, slices=slices)


def _nll_loss2d(call: _Call) -> Piece:
    """Classes along dim 1 of the scores, which the targets have not."""
    scores, target, weight, reduction, _ = call.args
    rows, slices = call.only(scores), dict[fx.Node, Rows]()
    call.outside_dims(rows, [1], len(_shape(scores)))
    if reduction == _MEAN:
        raise call.refuse("divides by a count of all rows")
    of_target = _without_classes(rows)
    call.at(target, of_target, slices)
    call.must_be_whole(weight)
    return Piece(forms=(of_target if reduction == _NONE else PARTIAL, PARTIAL), slices=slices)


def _nll_loss2d_backward(call: _Call) -> Piece:
    gradient, scores, target, weight, _, _, total_weight = call.args
    rows, slices = call.rows(scores), dict[fx.Node, Rows]()
    if rows is None:
        of_target = call.only(gradient if _shape(gradient) else target)
        rows = Rows(of_target.start + bool(of_target.start), of_target.stop + bool(of_target.start))
    call.outside_dims(rows, [1], len(_shape(scores)))
    call.at(scores, rows, slices)
    if rows.start and scores in slices:
        raise call.refuse(f"wants {scores.name} side by side, which its slices are not")
    call.at(target, _without_classes(rows), slices)
    if _shape(gradient):
        call.at(gradient, _without_classes(rows), slices)
    call.must_be_whole(weight, total_weight)
    return call.result(rows, slices=slices)


def _without_classes(rows: Rows) -> Rows:
    """The rows where dim 1 is missing."""
    return Rows(rows.start - (rows.start > 1), rows.stop - (rows.start > 1))


def _elementwise_loss(call: _Call) -> Piece:
    """A loss of each element, added up or not; `SUMMED_LOSSES` says where its reduction stands."""
    reduction = call.option(SUMMED_LOSSES[call.node.target], _MEAN)
    if reduction == _MEAN:
        raise call.refuse("divides by a count of all rows")
    rows, slices = _broadcast(call, _broadcast_shape(call))
    return call.result(rows if reduction == _NONE else PARTIAL, slices=slices)


def _elementwise_loss_backward(call: _Call) -> Piece:
    if call.option(SUMMED_LOSSES_BACKWARD[call.node.target], _MEAN) == _MEAN:
        raise call.refuse("divides by a count of all rows")
    return _elementwise(call)


def _broadcast_shape(call: _Call) -> tuple[int, ...]:
    return tuple(
        torch.broadcast_shapes(*(_shape(operand) for operand in call.node.all_input_nodes))
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


_RULES: dict[Any, _Rule] = {
    _aten.nll_loss2d_forward.default: _nll_loss2d,
    _aten.nll_loss2d_backward.default: _nll_loss2d_backward,
    **dict.fromkeys(SUMMED_LOSSES, _elementwise_loss),
    **dict.fromkeys(SUMMED_LOSSES_BACKWARD, _elementwise_loss_backward),
    **dict.fromkeys(
        (
            _aten._to_copy.default,
            _aten.detach.default,
            _aten.alias.default,
            _aten.hardtanh_backward.default,
        ),
        _elementwise,
    ),
    dropout_apply: _elementwise,
    **dict.fromkeys((_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default), _view),
    **dict.fromkeys((_aten.t.default, _aten.transpose.int), _transpose),
    _aten.permute.default: _permute,
    _aten.expand.default: _expand,
    _aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((_aten.squeeze.dim, _aten.squeeze.dims), _squeeze),
    _aten.slice.Tensor: _along_another_dim,
    _aten.select.int: _select,
    **dict.fromkeys((_aten.split.Tensor, _aten.split_with_sizes.default), _split),
    _aten.constant_pad_nd.default: _pad,
    _aten.cat.default: _cat,
    **dict.fromkeys(
        (
            _aten.zeros_like.default,
            _aten.ones_like.default,
            _aten.full_like.default,
            _aten.empty_like.default,
        ),
        _like,
    ),
    **dict.fromkeys(
        (
            _aten.new_zeros.default,
            _aten.new_ones.default,
            _aten.new_full.default,
            _aten.new_empty.default,
        ),
        _new,
    ),
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.sum.default), _sum),
    **dict.fromkeys((_aten.mean.dim, _aten.mean.default), _mean),
    **dict.fromkeys(
        (
            _aten.amax.default,
            _aten.amin.default,
            _aten.logsumexp.default,
            _aten.any.dim,
            _aten.argmax.default,
        ),
        _reduction,
    ),
    **dict.fromkeys((_aten.max.dim, _aten.min.dim), _reduction_with_indices),
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default), _softmax),
    **dict.fromkeys(
        (_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default),
        _softmax_backward,
    ),
    **dict.fromkeys(
        (_aten.gather.default, _aten.scatter.value, _aten.scatter.src, _aten.scatter_add.default),
        _indexed,
    ),
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default), _matrix_product),
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default), _product_and_sum),
    _aten.nll_loss_forward.default: _nll_loss,
    **dict.fromkeys((_aten.nll_loss_backward.default, cross_entropy_backward), _nll_loss_backward),
}
