"""Where in a joint graph chunks are worth while, and what keeps a region from running in them.

A region begins with a matrix product whose result is large, and is apart along the rows of that. It is the calls that read or make a
value by rows of at least half that size (and larger than the product's operand), and what lies between two of them in the same half of
the step. Further products whose result it reads join it: a second one beside the first, and those with which its backward begins.

The *loss block* begins with the last matrix product before the loss (logits: tokens x vocabulary) and ends with the gradients of its
operands. A *feed-forward block* begins with a product that widens its operand, and nothing as large leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import storage_ids
from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.chunking.forms import Form, InseparableError, Piece, Rows, rows_within
from rockmate.graph.chunking.separate import add_piece, is_elementwise, separate
from rockmate.ops.rng import is_random

_aten = torch.ops.aten
_FORWARD_ENDS = {RoleKind.OUTPUT, RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE}
_PRODUCTS: dict[Any, int] = {
    _aten.mm.default: 0,
    _aten.addmm.default: 1,
    _aten.bmm.default: 0,
    _aten.baddbmm.default: 1,
}
"""Matrix products, and the place of the operand whose rows their result has."""
_BATCHED = {_aten.bmm.default, _aten.baddbmm.default}

_NOTHING_BEHIND = "has nothing behind it that could run in chunks"
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.t.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Calls that can run in chunks.

    Attributes:
        name: path of the submodule of its first product.
        num_rows: rows along which it comes apart.
        forward: its calls that the forward runs, in graph order.
        backward: its calls that run in the backward, in graph order.
        given: what it is taken apart along: values from outside, and which of their dims run over the rows.
        pieces: how each of them runs on one chunk.
        num_bytes: of its largest value, that of which a chunk has a part.
    """

    name: str
    num_rows: int
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    given: Mapping[fx.Node, Rows]
    pieces: Mapping[fx.Node, Piece]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a block cannot run in chunks.

    Attributes:
        call: the op that stands in the way, empty if there is none.
        module: path of its submodule.
        reason: what it does.
        block: path of the submodule with which the block begins, empty if there is no block.
    """

    call: str
    module: str
    reason: str
    block: str = ""

    def __str__(self) -> str:
        return (
            f"{self.call} in {self.module or 'no single submodule'} {self.reason}"
            if self.call
            else self.reason
        )


def find_loss_block(capture: Capture, *, at_once: bool = False) -> Region | Refusal:
    """The loss block of a captured step, or why it cannot run in chunks.

    Args:
        capture: the joint graph and its ends.
        at_once: whether the backward of each chunk is to follow its forward, before the sums over all rows are there.
    """
    losses = _losses(capture)
    if len(losses) != 1:
        return Refusal(
            call="",
            module="",
            reason=f"the step has {len(losses)} differentiable outputs, and a loss block has one",
        )
    if _numel(losses[0]) != 1:
        return Refusal(
            call="",
            module="",
            reason="the step's differentiable output is no scalar, so the loss is computed outside of it",
        )
    before_loss = _ancestors(losses, capture)
    products = [
        node
        for node in capture.joint.graph.nodes
        if node.target in _PRODUCTS and node in before_loss
    ]
    if not products:
        return Refusal(call="", module="", reason="no matrix product comes before the loss")
    return region_of(capture, products[-1], at_once=at_once)


def find_feed_forward(
    capture: Capture, loss_block: Region | Refusal, *, least_bytes: int = 0
) -> dict[fx.Node, Region | Refusal]:
    """The blocks that widen a value, work on it row by row, and narrow it again, by the matrix products with which they begin.

    Products of the forward that widen a value and cannot run in chunks with what follows are among them, with what keeps them from it.

    Args:
        capture: the joint graph and its ends.
        loss_block: what `find_loss_block` says of the same graph; none of its products counts.
        least_bytes: blocks that begin with a smaller product are left out.
    """
    found: dict[fx.Node, Region | Refusal] = {}
    taken = set(loss_block.pieces) if isinstance(loss_block, Region) else set[fx.Node]()
    halves = Halves(capture)
    for node in capture.joint.graph.nodes:
        if node in taken or not _widens(node) or node.meta["val"].nbytes < least_bytes:
            continue
        if (
            isinstance(loss_block, Refusal)
            and loss_block.block
            and _module(node) == loss_block.block
        ):
            continue
        block = (
            region_of(capture, node, halves=halves)
            if node.target in _PRODUCTS
            else _refused_product(node)
        )
        if isinstance(block, Region):
            if node in block.forward and block.backward and _is_narrowed(block, _numel(node)):
                found[node] = block
                taken.update(block.pieces)
        elif node in halves.forward and block.reason != _NOTHING_BEHIND:
            found[node] = block
    return found


def _widens(node: fx.Node) -> bool:
    """Whether a call is a matrix product, known or by its shapes, whose result is half as large again as its operand, or larger."""
    if node.target in _PRODUCTS:
        operand = node.args[_PRODUCTS[node.target]]
        return isinstance(operand, fx.Node) and 2 * _numel(node) >= 3 * _numel(operand)
    tensors = [
        value for value in (node, *node.args[:2]) if isinstance(value, fx.Node) and _numel(value)
    ]
    if node.op != "call_function" or len(tensors) < 3:
        return False
    result, rows, weight = map(_shape, tensors)
    is_product = len(weight) > 1 and result == (*rows[:-1], weight[-1]) and rows[-1] == weight[-2]
    return is_product and 2 * _numel(node) >= 3 * _numel(tensors[1])


def _refused_product(node: fx.Node) -> Refusal:
    """Why a matrix product that is none of `_PRODUCTS` has no rows."""
    module = _module(node)
    groups = [
        value
        for value in node.all_input_nodes
        if _numel(value) and not value.meta["val"].is_floating_point()
    ]
    reason = (
        "multiplies rows group by group, and which rows a group has depends on values"
        if groups
        else "has no rule for rows"
    )
    return Refusal(
        call=InseparableError(node, reason).call, module=module, reason=reason, block=module
    )


def _module(node: fx.Node) -> str:
    return node.meta.get("module", "")


def _is_narrowed(region: Region, num_elements: int) -> bool:
    """Whether all that leaves the region by rows has fewer elements."""
    leaving = [
        node for node in region.pieces if any(user not in region.pieces for user in node.users)
    ]
    return all(
        _numel(node) < num_elements or not isinstance(region.pieces[node].forms[0], Rows)
        for node in leaving
    )


def region_of(
    capture: Capture, product: fx.Node, *, at_once: bool = False, halves: Halves | None = None
) -> Region | Refusal:
    """The region of calls that begins with a matrix product, apart along the rows of its result; `halves` saves finding them."""
    module = _module(product)
    halves = halves or Halves(capture)
    operand = product.args[_PRODUCTS[product.target]]
    assert isinstance(operand, fx.Node)
    refusals: list[Refusal] = []
    for rows in _rows_of_operand(product, operand):
        try:
            return _region(capture, product, operand, rows, module, halves, at_once=at_once)
        except InseparableError as error:
            refusals.append(
                Refusal(
                    call=error.call, module=_module(error.node), reason=error.reason, block=module
                )
            )
    return refusals[0]


def _rows_of_operand(product: fx.Node, operand: fx.Node) -> list[Rows]:
    """What may be the rows of a product's operand: all dims but the last; of a batched one also the middle one alone (experts)."""
    shape = _shape(operand)
    found = [rows_within(shape, 0, len(shape) - 1)]
    if product.target in _BATCHED and Rows(1, 2) not in found:
        found.append(Rows(1, 2))
    return found


def _region(
    capture: Capture,
    product: fx.Node,
    operand: fx.Node,
    rows: Rows,
    module: str,
    halves: Halves,
    *,
    at_once: bool,
) -> Region:
    parts = [halves.forward | halves.backward] if at_once else [halves.forward, halves.backward]
    joined = frozenset() if at_once else halves.backward
    given = {operand: rows}
    num_rows, least = prod(_shape(operand)[rows.start : rows.stop]), _numel(product) // 2
    if _numel(product) > _numel(
        operand
    ):  # what is as narrow as the operand is none of the region's large values
        least = max(least, _numel(operand) + 1)
    if not num_rows or num_rows < 2:
        raise InseparableError(product, "has a single row")
    starts = [product]
    while True:
        nodes = _members(capture, parts, given, starts, least, joined)
        pieces = separate(nodes, given, num_rows, joined=joined)
        more = _further_elementwise(pieces, num_rows, least) or (
            {} if at_once else _further_products(pieces, num_rows, least)
        )
        if not more:
            break
        starts += more
        given |= dict(more.values())
    held = _held_outputs(capture)
    outputs = [
        node for node in nodes if not held.isdisjoint(storage_ids(node)) and _numel(node) >= least
    ]
    if outputs:  # the logits are returned, so whole in memory anyway: what follows can still run in chunks of them
        given = {node: form for node in outputs if isinstance(form := pieces[node].forms[0], Rows)}
        readers = [user for node in given for user in node.users if user not in given]
        nodes = _members(capture, parts, given, readers, least, joined)
        pieces = separate(nodes, given, num_rows, joined=joined)
    forward = tuple(node for node in nodes if node in halves.forward)
    backward = tuple(node for node in nodes if node in halves.backward)
    if not forward or not backward:
        raise InseparableError(product, _NOTHING_BEHIND)
    return Region(
        name=module,
        num_rows=num_rows,
        forward=forward,
        backward=backward,
        given=given,
        pieces=pieces,
        num_bytes=product.meta["val"].nbytes,
    )


def _further_products(
    pieces: Mapping[fx.Node, Piece], num_rows: int, least: int
) -> dict[fx.Node, tuple[fx.Node, Rows]]:
    """Products whose large result the region takes by rows from outside, and their operand by rows: they can run in its chunks."""
    found = {}
    for value in _large_from_outside(pieces, least):
        made = value
        while made.target in _VIEWS:
            made = made.all_input_nodes[0]
        operand = made.args[_PRODUCTS[made.target]] if made.target in _PRODUCTS else None
        if not isinstance(operand, fx.Node) or operand in pieces or made in pieces:
            continue
        for rows in _rows_of_operand(made, operand):
            if prod(_shape(operand)[rows.start : rows.stop]) == num_rows:
                found.setdefault(made, (operand, rows))
    return found


def _further_elementwise(
    pieces: Mapping[fx.Node, Piece], num_rows: int, least: int
) -> dict[fx.Node, tuple[fx.Node, Rows]]:
    """Elementwise calls that broadcast small operands to a large value that the region takes by rows, and an operand with the rows.

    Class weights along the vocabulary times a gradient along the tokens is one: no reason to have it as a whole.
    """
    found = {}
    for made, rows in _large_from_outside(pieces, least).items():
        if (
            made in pieces
            or not is_elementwise(made)
            or any(_num_own(operand) >= least for operand in made.all_input_nodes)
        ):
            continue
        for operand in made.all_input_nodes:
            shift = len(_shape(made)) - len(_shape(operand))
            start, stop = max(0, rows.start - shift), max(0, rows.stop - shift)
            if operand not in pieces and prod(_shape(operand)[start:stop]) == num_rows:
                found[made] = operand, rows_within(_shape(operand), start, stop)
    return found


def _large_from_outside(pieces: Mapping[fx.Node, Piece], least: int) -> dict[fx.Node, Rows]:
    """Large values that the region takes by rows from outside, and where they have them."""
    return {
        value: rows
        for piece in pieces.values()
        for value, rows in piece.slices.items()
        if _numel(value) >= least
    }


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


class Halves:
    """The calls that the forward runs, and those that run in the backward."""

    def __init__(self, capture: Capture) -> None:
        nodes = list(capture.joint.graph.nodes)
        ends = [node for node, role in capture.outputs if role.kind in _FORWARD_ENDS]
        ends += [node for node in nodes if is_random(node.target)]
        forward = _ancestors(ends, capture)
        calls = [node for node in nodes if node.op == "call_function"]
        self.forward = frozenset(node for node in calls if node in forward)
        self.backward = frozenset(node for node in calls if node not in forward)


def _losses(capture: Capture) -> list[fx.Node]:
    differentiable = {role.index for _, role in capture.inputs if role.kind is RoleKind.TANGENT}
    return [
        node
        for node, role in capture.outputs
        if role.kind is RoleKind.OUTPUT and role.index in differentiable
    ]


def _ancestors(ends: Iterable[fx.Node], capture: Capture) -> set[fx.Node]:
    return _reached(ends, set(capture.joint.graph.nodes), lambda node: node.all_input_nodes)


def _members(
    capture: Capture,
    parts: Sequence[Collection[fx.Node]],
    given: Mapping[fx.Node, Rows],
    starts: Sequence[fx.Node],
    least: int,
    joined: Collection[fx.Node],
) -> list[fx.Node]:
    """The calls of the region that begins with `starts`: those that read or make its large values, and what lies between."""
    calls = [
        node
        for node in capture.joint.graph.nodes
        if node.op == "call_function" and node not in given
    ]
    num_rows = next(
        prod(node.meta["val"].shape[rows.start : rows.stop]) for node, rows in given.items()
    )
    members: set[fx.Node] = set(starts)
    large: set[fx.Node] = set()
    pieces: dict[fx.Node, Piece] = {}
    forms: dict[fx.Node, Form] = dict(given)
    for node in calls:
        if node in members or not large.isdisjoint(node.all_input_nodes):
            members.add(node)
            add_piece(node, pieces, forms, members, num_rows, joined)
            if _makes_several(node) or (
                _numel(node) >= least and isinstance(forms.get(node), Rows)
            ):
                large.add(node)
    for part in parts:
        inside = members.intersection(part)
        members |= _reached(inside, part, lambda node: node.users) & _reached(
            inside, part, lambda node: node.all_input_nodes
        )
    return [node for node in calls if node in members]


def _reached(
    starts: Iterable[fx.Node],
    within: Collection[fx.Node],
    step: Callable[[fx.Node], Iterable[fx.Node]],
) -> set[fx.Node]:
    """What can be reached from `starts` step by step without leaving `within`."""
    found: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node not in found and node in within:
            found.add(node)
            pending += step(node)
    return found


def _makes_several(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _num_own(node: fx.Node) -> int:
    """Elements that a value has in memory: fewer than it shows where it is expanded."""
    value = node.meta.get("val")
    return (
        value.untyped_storage().nbytes() // value.element_size()
        if isinstance(value, torch.Tensor)
        else 0
    )


def _held_outputs(capture: Capture) -> set[int]:
    return {
        memory
        for node, role in capture.outputs
        if role.kind is RoleKind.OUTPUT
        for memory in storage_ids(node)
    }
