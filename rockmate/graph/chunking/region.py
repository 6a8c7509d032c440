"""Finds regions of a joint graph that gain from chunks, and the reasons that refuse others.

A region begins with a matrix product with a large result. It is separated along the rows of that
result. A value by rows is *large* if it has at least half as many elements as the result, and more
than the product's operand. The region has the calls that read or write large values, and the calls
between two of them in the same half of the step.

A further product joins the region if the region reads its large result. One can stand beside the
first product, and others at the start of the backward. `blocks` finds the first products.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import calls_in, reached, storage_ids
from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.chunking.calls import is_fill
from rockmate.graph.chunking.forms import (
    ChunkedCall,
    Form,
    InseparableError,
    Rows,
    RowSpace,
    rows_within,
    shape_of,
)
from rockmate.graph.chunking.row_spaces import (
    PRODUCTS,
    VIEWS,
    Halves,
    Large,
    check_cut,
    rows_of_operand,
    rows_of_product,
)
from rockmate.graph.chunking.separate import add_chunked_call, is_elementwise, separate

_aten = torch.ops.aten
_SCATTERS = {_aten.scatter.src, _aten.scatter.value, _aten.scatter_add.default}

EMPTY_REGION = "begins no region with calls in both the forward and the backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Calls that can run in chunks.

    Attributes:
        name: path of the submodule of the first product.
        space: the rows.
        forward: calls in the forward, in graph order.
        backward: calls in the backward, in graph order.
        input_rows: values from outside -> the dims that run over the rows.
        chunked_calls: call -> how it runs on one chunk.
        num_bytes: bytes of the result of the first product.
    """

    name: str
    space: RowSpace
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    input_rows: Mapping[fx.Node, Rows]
    chunked_calls: Mapping[fx.Node, ChunkedCall]
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.space.num_rows


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

    @classmethod
    def of(cls, error: InseparableError, block: str) -> Refusal:
        """That of a block in which an op prevents chunks."""
        module = module_of(error.node)
        return cls(call=error.call, module=module, reason=error.reason, block=block)

    def __str__(self) -> str:
        where = f"{self.call} in {self.module or 'no single submodule'} "
        return where + self.reason if self.call else self.reason


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
        at_once: as for `find_blocks`.
        halves: forward and backward of the capture. None computes them.
    """
    module = module_of(product)
    halves = halves or Halves(capture)
    operand = product.args[PRODUCTS[product.target]]
    assert isinstance(operand, fx.Node)
    refusals: list[Refusal] = []
    for rows, space in rows_of_product(product, operand, halves):
        try:
            return _region(capture, product, operand, rows, space, halves, at_once=at_once)
        except InseparableError as error:
            refusals.append(Refusal.of(error, module))
    return refusals[0]


def _region(
    capture: Capture,
    product: fx.Node,
    operand: fx.Node,
    rows: Rows,
    space: RowSpace,
    halves: Halves,
    *,
    at_once: bool,
) -> Region:
    parts = [halves.forward | halves.backward] if at_once else [halves.forward, halves.backward]
    sum_readers = frozenset() if at_once else halves.backward
    input_rows = {operand: rows}
    large = Large(product, operand, space)
    if space.num_rows < 2:
        raise InseparableError(product, "has a single row")

    def grown(
        input_rows: Mapping[fx.Node, Rows], starts: Sequence[fx.Node]
    ) -> tuple[list[fx.Node], dict[fx.Node, ChunkedCall]]:
        nodes = _calls_of_region(capture, parts, input_rows, starts, space, large, sum_readers)
        return nodes, separate(nodes, input_rows, space, sum_readers=sum_readers)

    starts = [product]
    while True:
        nodes, chunked_calls = grown(input_rows, starts)
        further = {
            call: operand
            for call, operand in _further_starts(chunked_calls, space, large, halves).items()
            if not at_once or call in halves.forward or call.target not in PRODUCTS
        }
        if further.keys() <= set(starts):  # one may have been started from and be left out
            break
        starts += further
        input_rows |= dict(further.values())
    returned = _returned_storages(capture)
    outputs = [
        node for node in nodes if not returned.isdisjoint(storage_ids(node)) and node in large
    ]
    if outputs:
        # Returned logits are whole in memory. The calls after them can still run in chunks.
        input_rows = {
            node: form for node in outputs if isinstance(form := chunked_calls[node].forms[0], Rows)
        }
        readers = [user for node in input_rows for user in node.users if user not in input_rows]
        nodes, chunked_calls = grown(input_rows, readers)
    forward = tuple(node for node in nodes if node in halves.forward)
    backward = tuple(node for node in nodes if node in halves.backward)
    if not forward:
        raise InseparableError(product, EMPTY_REGION)
    check_cut(chunked_calls, space)
    return Region(
        name=module_of(product),
        space=space,
        forward=forward,
        backward=backward,
        input_rows=input_rows,
        chunked_calls=chunked_calls,
        num_bytes=product.meta["val"].nbytes,
    )


def _further_starts(
    chunked_calls: Mapping[fx.Node, ChunkedCall], space: RowSpace, large: Large, halves: Halves
) -> dict[fx.Node, tuple[fx.Node, Rows]]:
    """Maps further calls that the region can run in its chunks to their operand and its rows.

    They are products, and elementwise calls and scatters of small operands, such as class weights
    times a gradient of tokens. The region reads their large results by rows, or what is computed
    from these.
    """
    products, elementwise = {}, {}
    seen = set[fx.Node]()
    pending = [pair for call in chunked_calls.values() for pair in call.slices.items()]
    while pending:
        call, rows = pending.pop()
        if call in seen or call in chunked_calls or call not in large:
            continue
        seen.add(call)
        operands = [each for each in call.all_input_nodes if each not in chunked_calls]
        if call.target in PRODUCTS:
            operand = call.args[PRODUCTS[call.target]]
            assert isinstance(operand, fx.Node)
            for own in rows_of_operand(call, operand) if operand in operands else ():
                if space.copies(prod(shape_of(operand)[own.start : own.stop])):
                    products.setdefault(call, (operand, own))
        elif (is_elementwise(call) or call.target in _SCATTERS) and all(
            is_fill(each) or _num_stored_elements(each) < large.min_elements
            for each in call.all_input_nodes
        ):
            for operand in operands:
                shift = len(shape_of(call)) - len(shape_of(operand))
                start, stop = max(0, rows.start - shift), max(0, rows.stop - shift)
                across = prod(shape_of(operand)[start:stop])
                if across > 1 and space.copies(across) and not is_fill(operand):
                    elementwise[call] = operand, rows_within(shape_of(operand), start, stop)
        elif is_elementwise(call):
            pending += [(each, rows) for each in operands if shape_of(each) == shape_of(call)]
        elif call.target is _aten.select_backward.default:
            dim: Any = call.args[2]
            shift = int(rows.start > dim % len(shape_of(call)))
            pending += [(each, Rows(rows.start - shift, rows.stop - shift)) for each in operands]
        elif call.target in VIEWS or call in halves.forward:
            pending += [(each, Rows(0, 0)) for each in operands]
    return elementwise or products


def _returned_storages(capture: Capture) -> set[int]:
    made = (node for node, role in capture.outputs if role.kind is RoleKind.OUTPUT)
    return {storage for node in made for storage in storage_ids(node)}


def _calls_of_region(
    capture: Capture,
    parts: Sequence[Collection[fx.Node]],
    input_rows: Mapping[fx.Node, Rows],
    starts: Sequence[fx.Node],
    space: RowSpace,
    large: Large,
    sum_readers: Collection[fx.Node],
) -> list[fx.Node]:
    """Returns the calls of the region of `starts`, in graph order.

    They read or write large values, or lie between two such calls in the same one of `parts`. All
    results of a call are taken from it within the region.
    """
    calls = [node for node in calls_in(capture.joint.graph) if node not in input_rows]
    members: set[fx.Node] = set(starts)
    found: set[fx.Node] = set()
    chunked_calls: dict[fx.Node, ChunkedCall] = {}
    forms: dict[fx.Node, Form] = dict(input_rows)
    for node in calls:
        if node in members or not found.isdisjoint(node.all_input_nodes):
            members.add(node)
            add_chunked_call(node, chunked_calls, forms, members, space, sum_readers)
            if has_several_results(node) or (node in large and isinstance(forms.get(node), Rows)):
                found.add(node)
    for part in parts:
        inside = members.intersection(part)
        above = reached(inside, lambda node: node.all_input_nodes, part)
        members |= above & reached(inside, lambda node: node.users, part)
    members |= {user for each in members if has_several_results(each) for user in each.users}
    return [node for node in calls if node in members]


def has_several_results(node: fx.Node) -> bool:
    """Whether a call returns a tuple."""
    return isinstance(node.meta.get("val"), tuple | list)


def _num_stored_elements(node: fx.Node) -> int:
    """Returns the number of elements in a value's storage: fewer than `numel` if expanded."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return value.untyped_storage().nbytes() // value.element_size()
