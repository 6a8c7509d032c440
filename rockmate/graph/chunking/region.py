"""Finds regions of a joint graph that gain from chunks, and the reasons that refuse others.

A region begins with a matrix product with a large result. It is separated along the rows of that
result. A value by rows is *large* if it has at least half as many elements as the result, and more
than the product's operand. The region has the calls that read or write large values, and the calls
between two of them in the same half of the step.

A further product joins the region if the region reads its large result. One can stand beside the
first product, and others at the start of the backward.

The *loss block* begins with the last matrix product before the loss, the logits of tokens x
vocabulary. It ends with the gradients of that product's operands. `feed_forward` finds feed-forward
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import ancestors, storage_ids
from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.chunking.forms import (
    ChunkedCall,
    Form,
    InseparableError,
    Rows,
    rows_within,
    shape_of,
)
from rockmate.graph.chunking.separate import add_chunked_call, is_elementwise, separate
from rockmate.graph.ir import FORWARD_ENDS
from rockmate.ops.rng import is_random

_aten = torch.ops.aten
# Matrix products -> the position of the left operand. The result has its rows.
PRODUCTS: dict[Any, int] = {
    _aten.mm.default: 0,
    _aten.addmm.default: 1,
    _aten.bmm.default: 0,
    _aten.baddbmm.default: 1,
}
_BATCHED = {_aten.bmm.default, _aten.baddbmm.default}

EMPTY_REGION = "begins no region with calls in both the forward and the backward"
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.t.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Calls that can run in chunks.

    Attributes:
        name: path of the submodule of the first product.
        num_rows: number of rows.
        forward: calls in the forward, in graph order.
        backward: calls in the backward, in graph order.
        input_rows: values from outside -> the dims that run over the rows.
        chunked_calls: call -> how it runs on one chunk.
        num_bytes: bytes of the result of the first product.
    """

    name: str
    num_rows: int
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    input_rows: Mapping[fx.Node, Rows]
    chunked_calls: Mapping[fx.Node, ChunkedCall]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The reason why a block cannot run in chunks.

    Attributes:
        call: the op that prevents chunks. Empty if no single op does.
        module: path of the op's submodule.
        reason: a predicate of `call`, or a whole clause if `call` is empty.
        block: path of the submodule of the block's first product. Empty if there is no block.
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
    """Returns the loss block of a captured step, or the reason why it cannot run in chunks.

    Args:
        capture: the joint graph and its roles.
        at_once: whether the backward of each chunk directly follows its forward. Sums over all
            rows are then not complete.
    """
    losses = _losses(capture)
    if len(losses) != 1:
        reason = f"the step has {len(losses)} differentiable outputs, and a loss block needs one"
        return Refusal(call="", module="", reason=reason)
    if numel(losses[0]) != 1:
        reason = "the step's output is no scalar, so the loss is computed outside the step"
        return Refusal(call="", module="", reason=reason)
    before_loss = ancestors(losses)
    products = [
        node
        for node in capture.joint.graph.nodes
        if node.target in PRODUCTS and node in before_loss
    ]
    if not products:
        return Refusal(call="", module="", reason="no matrix product comes before the loss")
    return region_of(capture, products[-1], at_once=at_once)


def module_of(node: fx.Node) -> str:
    """Returns the path of a call's submodule. Empty if unknown."""
    return node.meta.get("module", "")


def region_of(
    capture: Capture, product: fx.Node, *, at_once: bool = False, halves: Halves | None = None
) -> Region | Refusal:
    """Returns the region of a matrix product, separated along the rows of its result.

    Args:
        capture: the joint graph and its roles.
        product: the first call of the region.
        at_once: as for `find_loss_block`.
        halves: forward and backward of the capture. None computes them.
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
    """Returns the possible rows of a product's operand: all dims but the last.

    The rows of a batched product may also be the middle dim alone, for example in experts.
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
    sum_readers = frozenset() if at_once else halves.backward
    input_rows = {operand: rows}
    num_rows, min_elements = prod(shape_of(operand)[rows.start : rows.stop]), numel(product) // 2
    if numel(product) > numel(operand):
        # A value as narrow as the operand is not large.
        min_elements = max(min_elements, numel(operand) + 1)
    if not num_rows or num_rows < 2:
        raise InseparableError(product, "has a single row")
    starts = [product]
    while True:
        nodes = _calls_of_region(capture, parts, input_rows, starts, min_elements, sum_readers)
        chunked_calls = separate(nodes, input_rows, num_rows, sum_readers=sum_readers)
        further = _further_elementwise(chunked_calls, num_rows, min_elements) or (
            {} if at_once else _further_products(chunked_calls, num_rows, min_elements)
        )
        if not further:
            break
        starts += further
        input_rows |= dict(further.values())
    returned = _returned_storages(capture)
    outputs = [
        node
        for node in nodes
        if not returned.isdisjoint(storage_ids(node)) and numel(node) >= min_elements
    ]
    if outputs:
        # Returned logits are whole in memory. The calls after them can still run in chunks.
        input_rows = {
            node: form for node in outputs if isinstance(form := chunked_calls[node].forms[0], Rows)
        }
        readers = [user for node in input_rows for user in node.users if user not in input_rows]
        nodes = _calls_of_region(capture, parts, input_rows, readers, min_elements, sum_readers)
        chunked_calls = separate(nodes, input_rows, num_rows, sum_readers=sum_readers)
    forward = tuple(node for node in nodes if node in halves.forward)
    backward = tuple(node for node in nodes if node in halves.backward)
    if not forward or not backward:
        raise InseparableError(product, EMPTY_REGION)
    return Region(
        name=module,
        num_rows=num_rows,
        forward=forward,
        backward=backward,
        input_rows=input_rows,
        chunked_calls=chunked_calls,
        num_bytes=product.meta["val"].nbytes,
    )


def _further_products(
    chunked_calls: Mapping[fx.Node, ChunkedCall], num_rows: int, min_elements: int
) -> dict[fx.Node, tuple[fx.Node, Rows]]:
    """Maps further products of the region to their operand and its rows.

    The region reads their large results by rows, so they can run in its chunks.
    """
    found = {}
    for value in _large_from_outside(chunked_calls, min_elements):
        producer = value
        while producer.target in _VIEWS:
            producer = producer.all_input_nodes[0]
        operand = producer.args[PRODUCTS[producer.target]] if producer.target in PRODUCTS else None
        if (
            not isinstance(operand, fx.Node)
            or operand in chunked_calls
            or producer in chunked_calls
        ):
            continue
        for rows in _rows_of_operand(producer, operand):
            if prod(shape_of(operand)[rows.start : rows.stop]) == num_rows:
                found.setdefault(producer, (operand, rows))
    return found


def _further_elementwise(
    chunked_calls: Mapping[fx.Node, ChunkedCall], num_rows: int, min_elements: int
) -> dict[fx.Node, tuple[fx.Node, Rows]]:
    """Maps further elementwise calls of the region to an operand and its rows.

    They broadcast small operands to a large value, and the region reads it by rows. An example is
    the product of class weights along the vocabulary and a gradient along the tokens.
    """
    found = {}
    for producer, rows in _large_from_outside(chunked_calls, min_elements).items():
        if (
            producer in chunked_calls
            or not is_elementwise(producer)
            or any(
                _num_stored_elements(operand) >= min_elements
                for operand in producer.all_input_nodes
            )
        ):
            continue
        for operand in producer.all_input_nodes:
            shift = len(shape_of(producer)) - len(shape_of(operand))
            start, stop = max(0, rows.start - shift), max(0, rows.stop - shift)
            if operand not in chunked_calls and prod(shape_of(operand)[start:stop]) == num_rows:
                found[producer] = operand, rows_within(shape_of(operand), start, stop)
    return found


def _large_from_outside(
    chunked_calls: Mapping[fx.Node, ChunkedCall], min_elements: int
) -> dict[fx.Node, Rows]:
    """Maps large values from outside that the region slices to their rows."""
    return {
        value: rows
        for chunked_call in chunked_calls.values()
        for value, rows in chunked_call.slices.items()
        if numel(value) >= min_elements
    }


class Halves:
    """The calls of a joint graph, partitioned into forward and backward."""

    def __init__(self, capture: Capture) -> None:
        nodes = list(capture.joint.graph.nodes)
        ends = [node for node, role in capture.outputs if role.kind in FORWARD_ENDS]
        ends += [node for node in nodes if is_random(node.target)]
        forward = ancestors(ends)
        calls = [node for node in nodes if node.op == "call_function"]
        self.forward = frozenset(node for node in calls if node in forward)
        self.backward = frozenset(node for node in calls if node not in forward)


def _losses(capture: Capture) -> list[fx.Node]:
    """Returns the differentiable outputs of the step."""
    differentiable = {role.index for _, role in capture.inputs if role.kind is RoleKind.TANGENT}
    return [
        node
        for node, role in capture.outputs
        if role.kind is RoleKind.OUTPUT and role.index in differentiable
    ]


def _calls_of_region(
    capture: Capture,
    parts: Sequence[Collection[fx.Node]],
    input_rows: Mapping[fx.Node, Rows],
    starts: Sequence[fx.Node],
    min_elements: int,
    sum_readers: Collection[fx.Node],
) -> list[fx.Node]:
    """Returns the calls of the region of `starts`, in graph order.

    They read or write large values, or lie between two such calls in the same one of `parts`.
    """
    calls = [
        node
        for node in capture.joint.graph.nodes
        if node.op == "call_function" and node not in input_rows
    ]
    num_rows = next(
        prod(node.meta["val"].shape[rows.start : rows.stop]) for node, rows in input_rows.items()
    )
    members: set[fx.Node] = set(starts)
    large: set[fx.Node] = set()
    chunked_calls: dict[fx.Node, ChunkedCall] = {}
    forms: dict[fx.Node, Form] = dict(input_rows)
    for node in calls:
        if node in members or not large.isdisjoint(node.all_input_nodes):
            members.add(node)
            add_chunked_call(node, chunked_calls, forms, members, num_rows, sum_readers)
            if _has_several_results(node) or (
                numel(node) >= min_elements and isinstance(forms.get(node), Rows)
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
    """Returns the nodes of `within` on paths of `step` from `starts` that stay in `within`."""
    found: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node not in found and node in within:
            found.add(node)
            pending += step(node)
    return found


def _has_several_results(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def numel(node: fx.Node) -> int:
    """Returns the number of elements of a value. 0 if it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _num_stored_elements(node: fx.Node) -> int:
    """Returns the number of elements in a value's storage: fewer than `numel` if expanded."""
    value = node.meta.get("val")
    return (
        value.untyped_storage().nbytes() // value.element_size()
        if isinstance(value, torch.Tensor)
        else 0
    )


def _returned_storages(capture: Capture) -> set[int]:
    """Returns the storages of the outputs of the forward."""
    return {
        storage
        for node, role in capture.outputs
        if role.kind is RoleKind.OUTPUT
        for storage in storage_ids(node)
    }
