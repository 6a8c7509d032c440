"""Finds the blocks of a step that gain from chunks, and the reasons that refuse others.

A block begins with a matrix product that widens a value.

- A *loss block* reduces each row of it to a few numbers: cross entropy, log-probabilities of
  labels, an entropy, a divergence of two heads. A step may have several: of chosen and of rejected
  answers, of a frozen reference model. One without a backward runs in chunks of its forward.
- A *feed-forward block* computes row by row, and narrows the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import fx

from rockmate.capture.nodes import ancestors
from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.chunking.forms import InseparableError, Rows, shape_of
from rockmate.graph.chunking.region import (
    EMPTY_REGION,
    Refusal,
    Region,
    has_several_results,
    module_of,
    region_of,
)
from rockmate.graph.chunking.row_spaces import PRODUCTS, Halves, numel

_aten = torch.ops.aten
_PARTS = {_aten.slice.Tensor, _aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default}


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a step, by their first matrix product, in graph order.

    Attributes:
        losses: the loss blocks.
        refusal: of the last product that begins a loss block which cannot run in chunks.
        feed_forward: the feed-forward blocks, and refusals of products of the forward that widen a
            value and cannot run in chunks.
    """

    losses: Mapping[fx.Node, Region]
    refusal: Refusal
    feed_forward: Mapping[fx.Node, Region | Refusal]

    @property
    def loss(self) -> Region | Refusal:
        """The largest loss block, or why there is none."""
        return max(self.losses.values(), key=lambda block: block.num_bytes, default=self.refusal)


def find_blocks(capture: Capture, *, at_once: bool = False, least_bytes: float = inf) -> Blocks:
    """Returns the blocks of a captured step.

    Where no product is reduced row by row, the last one before the loss begins the loss block.

    Args:
        capture: the joint graph and its roles.
        at_once: whether the backward of each chunk directly follows its forward. Sums over all
            rows are then not complete. The step must have one loss.
        least_bytes: feed-forward blocks are left out if their widened value has fewer bytes.
    """
    differentiable = {role.index for _, role in capture.inputs if role.kind is RoleKind.TANGENT}
    outputs = [
        node
        for node, role in capture.outputs
        if role.kind is RoleKind.OUTPUT and role.index in differentiable
    ]
    reason = "no matrix product with a gradient comes before the loss"
    if len(outputs) != 1:
        reason = f"the step has {len(outputs)} differentiable outputs, and a loss block needs one"
    elif numel(outputs[0]) != 1:
        reason = "the step's output is no scalar, so the loss is computed outside the step"
    has_loss = [numel(node) for node in outputs] == [1]
    halves, before = Halves(capture), ancestors(outputs)
    products = [node for node in capture.joint.graph.nodes if node.target in PRODUCTS]
    products = [node for node in products if node in before]
    starts = [node for node in products if _widens(node) and _is_reduced(node, halves)]
    if not has_loss:
        starts = [] if at_once else starts
    elif not starts:
        starts = products[-1:]
    losses, refusal = dict[fx.Node, Region](), Refusal(call="", module="", reason=reason)
    taken = set(starts)
    for node in starts:
        if any(node in block.chunked_calls for block in losses.values()):
            continue
        block = region_of(capture, node, at_once=at_once, halves=halves)
        if isinstance(block, Refusal):
            refusal = block
        else:
            losses[node] = block
            taken.update(block.chunked_calls)
    if not any(block.backward for block in losses.values()):
        losses = {}
    return Blocks(losses, refusal, _feed_forward(capture, halves, taken, least_bytes))


def _feed_forward(
    capture: Capture, halves: Halves, taken: set[fx.Node], least_bytes: float
) -> dict[fx.Node, Region | Refusal]:
    found = {}
    for node in capture.joint.graph.nodes:
        if node in taken or not _widens(node) or node.meta["val"].nbytes < least_bytes:
            continue
        has_rule = node.target in PRODUCTS
        block = region_of(capture, node, halves=halves) if has_rule else _refused_product(node)
        if isinstance(block, Region):
            if node in block.forward and block.backward and _is_narrowed(block, numel(node)):
                found[node] = block
                taken.update(block.chunked_calls)
        elif node in halves.forward and block.reason != EMPTY_REGION:
            found[node] = block
    return found


def _is_reduced(product: fx.Node, halves: Halves) -> bool:
    """Whether all that the forward computes from large values is as large, or small.

    A part of a large value is large. Small has at most half as many elements as the product's
    operand.
    """
    operand = product.args[PRODUCTS[product.target]]
    assert isinstance(operand, fx.Node)
    of_product, of_operand = numel(product), numel(operand)
    seen, pending = {product}, [(product, of_product)]
    while pending:
        value, whole = pending.pop()
        for user in value.users:
            if user in seen or user not in halves.forward:
                continue
            seen.add(user)
            number = numel(user)
            if user.target in _PARTS or (value.target in _PARTS and has_several_results(value)):
                pending.append((user, number or whole))
            elif has_several_results(user) or (
                2 * number >= whole and number * of_product > of_operand * whole
            ):
                pending.append((user, whole))
            elif 2 * number > of_operand:
                return False
    return True


def _widens(node: fx.Node) -> bool:
    """Whether a call is a matrix product with at least 1.5 times its operand's elements.

    For a call outside `PRODUCTS`, the shapes decide whether it is a product.
    """
    if node.target in PRODUCTS:
        operand = node.args[PRODUCTS[node.target]]
        return isinstance(operand, fx.Node) and 2 * numel(node) >= 3 * numel(operand)
    tensors = [
        value for value in (node, *node.args[:2]) if isinstance(value, fx.Node) and numel(value)
    ]
    if node.op != "call_function" or len(tensors) < 3:
        return False
    result, rows, weight = map(shape_of, tensors)
    is_product = len(weight) > 1 and result == (*rows[:-1], weight[-1]) and rows[-1] == weight[-2]
    return is_product and 2 * numel(node) >= 3 * numel(tensors[1])


def _refused_product(node: fx.Node) -> Refusal:
    """Refuses a matrix product that is not in `PRODUCTS`."""
    reason = "has no rule for rows"
    tensors = [each for each in node.all_input_nodes if numel(each)]
    if not all(each.meta["val"].is_floating_point() for each in tensors):  # some tell the groups
        reason = "multiplies rows group by group, and the rows of a group depend on values"
    return Refusal.of(InseparableError(node, reason), module_of(node))


def _is_narrowed(region: Region, num_elements: int) -> bool:
    """Whether every value that leaves the region by rows has fewer than `num_elements`."""
    leaving = [
        node
        for node in region.chunked_calls
        if any(user not in region.chunked_calls for user in node.users)
    ]
    return all(
        numel(node) < num_elements or not isinstance(region.chunked_calls[node].forms[0], Rows)
        for node in leaving
    )
