"""Finds loss blocks. Such a block widens a value and reduces each row of it to a few numbers.

Cross entropy, the log-probabilities of labels, an entropy and a divergence of two heads are loss
blocks. A step may have several: a model reads chosen and rejected answers, a frozen reference model
has a head of its own. A block without a backward runs in chunks of its forward alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from rockmate.capture.nodes import ancestors
from rockmate.capture.roles import Capture, RoleKind
from rockmate.graph.chunking.region import Refusal, Region, has_several_results, region_of
from rockmate.graph.chunking.row_spaces import PRODUCTS, Halves, is_widened, numel

# A loss block runs in chunks where its largest value has this share of the largest block's.
_MIN_SHARE = 1 / 8
_aten = torch.ops.aten
_PARTS = {_aten.slice.Tensor, _aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default}


@dataclass(frozen=True, slots=True)
class LossBlocks:
    """The loss blocks of a step.

    Attributes:
        regions: first matrix product -> block, in graph order.
        refusal: of the last block that cannot run in chunks; None if all can.
    """

    regions: Mapping[fx.Node, Region]
    refusal: Refusal | None

    @property
    def largest(self) -> Region | Refusal:
        """The block of the largest value, or why there is none."""
        if self.regions:
            return max(self.regions.values(), key=lambda block: block.num_bytes)
        assert self.refusal is not None
        return self.refusal


def find_loss_blocks(capture: Capture, *, at_once: bool = False) -> LossBlocks:
    """Returns the loss blocks of a captured step, or the reason why it has none.

    Where no product is reduced row by row, the last product before the loss begins the only block.

    Args:
        capture: the joint graph and its roles.
        at_once: whether the backward of each chunk directly follows its forward. Sums over all
            rows are then not complete. The step must have one loss.
    """
    losses = _differentiable_outputs(capture)
    is_scalar = len(losses) == 1 and numel(losses[0]) == 1
    reason = ""
    if len(losses) != 1:
        reason = f"the step has {len(losses)} differentiable outputs, and a loss block needs one"
    elif not is_scalar:
        reason = "the step's output is no scalar, so the loss is computed outside the step"
    if reason and at_once:
        return LossBlocks({}, Refusal(call="", module="", reason=reason))
    before = ancestors(losses)
    products = [
        node for node in capture.joint.graph.nodes if node.target in PRODUCTS and node in before
    ]
    halves, refusal = Halves(capture), None
    found: dict[fx.Node, Region] = {}
    for product in products:
        if any(product in block.chunked_calls for block in found.values()):
            continue
        if is_widened(product) and _is_reduced(product, halves):
            block = region_of(capture, product, at_once=at_once, halves=halves)
            if isinstance(block, Region):
                found[product] = block
            else:
                refusal = block
    largest = max((block.num_bytes for block in found.values()), default=0)
    found = {
        product: block
        for product, block in found.items()
        if block.num_bytes >= _MIN_SHARE * largest
    }
    if any(block.backward for block in found.values()):
        return LossBlocks(found, refusal)
    if refusal is None and not reason and products:
        block = region_of(capture, products[-1], at_once=at_once, halves=halves)
        if isinstance(block, Region) and block.backward:
            return LossBlocks({products[-1]: block}, None)
        refusal = block if isinstance(block, Refusal) else None
        reason = "the last matrix product before the loss has no gradient"
    reason = reason or "no matrix product comes before the loss"
    return LossBlocks({}, refusal or Refusal(call="", module="", reason=reason))


def _differentiable_outputs(capture: Capture) -> list[fx.Node]:
    differentiable = {role.index for _, role in capture.inputs if role.kind is RoleKind.TANGENT}
    return [
        node
        for node, role in capture.outputs
        if role.kind is RoleKind.OUTPUT and role.index in differentiable
    ]


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
