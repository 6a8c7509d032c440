"""The regions of a joint graph that gain from chunks, and the reasons against others.

A region begins with a matrix product that has a large result, and is separated along the rows of
that result. Its calls are those that read or write a value by rows of at least half that size and
larger than the product's operand, and the calls between two of them in the same half of the step.
Further products join the region if it reads their result: one beside the first, and those at the
start of its backward.

The *loss block* begins with the last matrix product before the loss (logits: tokens x vocabulary)
and ends with the gradients of its operands. For feed-forward blocks see `feed_forward`.
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
from rockmate.graph.chunking.forms import (
    Form,
    InseparableError,
    Piece,
    Rows,
    rows_within,
    shape_of,
)
from rockmate.graph.chunking.separate import add_piece, is_elementwise, separate
from rockmate.ops.rng import is_random

_aten = torch.ops.aten
_FORWARD_ENDS = {RoleKind.OUTPUT, RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE}
# Matrix products -> the position of the operand whose rows the result has.
PRODUCTS: dict[Any, int] = {
    _aten.mm.default: 0,
    _aten.addmm.default: 1,
    _aten.bmm.default: 0,
    _aten.baddbmm.default: 1,
}
_BATCHED = {_aten.bmm.default, _aten.baddbmm.default}

NOTHING_BEHIND = "has nothing behind it that could run in chunks"
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.t.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Calls that can run in chunks.

    Attributes:
        name: path of the submodule of its first product.
        num_rows: number of rows.
        forward: its calls in the forward, in graph order.
        backward: its calls in the backward, in graph order.
        given: values from outside -> the dims that run over the rows.
        pieces: call -> how it runs on one chunk.
        num_bytes: bytes of its largest value.
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
    """The reason why a block cannot run in chunks.

    Attributes:
        call: the op that prevents it; empty if there is none.
        module: path of its submodule.
        reason: the fault, as a predicate of the op.
        block: path of the submodule with which the block begins; empty if there is no block.
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
    """The loss block of a captured step, or the reason against its chunks.

    Args:
        capture: the joint graph and its roles.
        at_once: the backward of each chunk follows its forward, before sums over all rows are
            known.
    """
    losses = _losses(capture)
    if len(losses) != 1:
        reason = f"the step has {len(losses)} differentiable outputs, and a loss block has one"
        return Refusal(call="", module="", reason=reason)
    if numel(losses[0]) != 1:
        reason = "the step's differentiable output is no scalar: the loss is computed outside of it"
        return Refusal(call="", module="", reason=reason)
    before_loss = _ancestors(losses, capture)
    products = [
        node
        for node in capture.joint.graph.nodes
        if node.target in PRODUCTS and node in before_loss
    ]
    if not products:
        return Refusal(call="", module="", reason="no matrix product comes before the loss")
    return region_of(capture, products[-1], at_once=at_once)


def module_of(node: fx.Node) -> str:
    """The path of a call's submodule; empty if unknown."""
    return node.meta.get("module", "")


def region_of(
    capture: Capture, product: fx.Node, *, at_once: bool = False, halves: Halves | None = None
) -> Region | Refusal:
    """The region that begins with a matrix product, separated along the rows of its result.

    Args:
        capture: the joint graph and its roles.
        product: the first call.
        at_once: see `find_loss_block`.
        halves: of the capture, if they are known.
    """
    module = module_of(product)
    halves = halves or Halves(capture)
    operand = product.args[PRODUCTS[product.target]]
    assert isinstance(operand, fx.Node)
    refusals: list[Refusal] = []
    for rows in _rows_of_operand(product, operand):
        try:
            return _region(capture, product, operand, rows, module, halves, at_once=at_once)
        except InseparableError as error:
            refusals.append(
                Refusal(
                    call=error.call, module=module_of(error.node), reason=error.reason, block=module
                )
            )
    return refusals[0]


def _rows_of_operand(product: fx.Node, operand: fx.Node) -> list[Rows]:
    """The possible rows of a product's operand: all dims but the last.

    A batched product may also have the middle dim alone, as experts do.
    """
    shape = shape_of(operand)
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
    num_rows, least = prod(shape_of(operand)[rows.start : rows.stop]), numel(product) // 2
    if numel(product) > numel(operand):
        # A value as narrow as the operand is none of the region's large values.
        least = max(least, numel(operand) + 1)
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
        node for node in nodes if not held.isdisjoint(storage_ids(node)) and numel(node) >= least
    ]
    if outputs:
        # Returned logits are in memory as a whole. The calls after them can still run in chunks.
        given = {node: form for node in outputs if isinstance(form := pieces[node].forms[0], Rows)}
        readers = [user for node in given for user in node.users if user not in given]
        nodes = _members(capture, parts, given, readers, least, joined)
        pieces = separate(nodes, given, num_rows, joined=joined)
    forward = tuple(node for node in nodes if node in halves.forward)
    backward = tuple(node for node in nodes if node in halves.backward)
    if not forward or not backward:
        raise InseparableError(product, NOTHING_BEHIND)
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
    """Further products for the region -> their operand and its rows.

    The region reads their large result by rows, so they can run in its chunks.
    """
    found = {}
    for value in _large_from_outside(pieces, least):
        made = value
        while made.target in _VIEWS:
            made = made.all_input_nodes[0]
        operand = made.args[PRODUCTS[made.target]] if made.target in PRODUCTS else None
        if not isinstance(operand, fx.Node) or operand in pieces or made in pieces:
            continue
        for rows in _rows_of_operand(made, operand):
            if prod(shape_of(operand)[rows.start : rows.stop]) == num_rows:
                found.setdefault(made, (operand, rows))
    return found


def _further_elementwise(
    pieces: Mapping[fx.Node, Piece], num_rows: int, least: int
) -> dict[fx.Node, tuple[fx.Node, Rows]]:
    """Further elementwise calls for the region -> an operand and its rows.

    They broadcast small operands to a large value that the region reads by rows, such as class
    weights along the vocabulary times a gradient along the tokens.
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
            shift = len(shape_of(made)) - len(shape_of(operand))
            start, stop = max(0, rows.start - shift), max(0, rows.stop - shift)
            if operand not in pieces and prod(shape_of(operand)[start:stop]) == num_rows:
                found[made] = operand, rows_within(shape_of(operand), start, stop)
    return found


def _large_from_outside(pieces: Mapping[fx.Node, Piece], least: int) -> dict[fx.Node, Rows]:
    """Large values from outside that the region slices -> their rows."""
    return {
        value: rows
        for piece in pieces.values()
        for value, rows in piece.slices.items()
        if numel(value) >= least
    }


class Halves:
    """The calls of the forward and those of the backward."""

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
    """The calls of the region that begins with `starts`, in graph order.

    They read or write its large values, or lie between two such calls in the same part.
    """
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
            if _makes_several(node) or (numel(node) >= least and isinstance(forms.get(node), Rows)):
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
    """The nodes that can be reached from `starts` without leaving `within`."""
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


def numel(node: fx.Node) -> int:
    """Number of elements of a value; 0 if it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _num_own(node: fx.Node) -> int:
    """Number of elements in a value's storage; fewer than its own if it is expanded."""
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
