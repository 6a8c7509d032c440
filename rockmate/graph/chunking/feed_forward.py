"""Finds feed-forward blocks. Such a block widens a value, computes row by row, and narrows it."""

from __future__ import annotations

from torch import fx

from rockmate.capture.roles import Capture
from rockmate.graph.chunking.forms import InseparableError, Rows, shape_of
from rockmate.graph.chunking.loss_blocks import LossBlocks
from rockmate.graph.chunking.region import EMPTY_REGION, Refusal, Region, module_of, region_of
from rockmate.graph.chunking.row_spaces import PRODUCTS, Halves, is_widened, numel


def find_feed_forward(
    capture: Capture, loss_blocks: LossBlocks, *, least_bytes: int = 0
) -> dict[fx.Node, Region | Refusal]:
    """Maps the first matrix product of each feed-forward block to the block.

    A product of the forward has a refusal if it widens a value and cannot run in chunks.

    Args:
        capture: the joint graph and its roles.
        loss_blocks: the result of `find_loss_blocks`. Their products are left out.
        least_bytes: blocks are left out if the result of their first product has fewer bytes.
    """
    found: dict[fx.Node, Region | Refusal] = {}
    taken = {call for block in loss_blocks.regions.values() for call in block.chunked_calls}
    refused = loss_blocks.largest
    halves = Halves(capture)
    for node in capture.joint.graph.nodes:
        if node in taken or not _widens(node) or node.meta["val"].nbytes < least_bytes:
            continue
        if isinstance(refused, Refusal) and refused.block and module_of(node) == refused.block:
            continue
        block = (
            region_of(capture, node, halves=halves)
            if node.target in PRODUCTS
            else _refused_product(node)
        )
        if isinstance(block, Region):
            if node in block.forward and block.backward and _is_narrowed(block, numel(node)):
                found[node] = block
                taken.update(block.chunked_calls)
        elif node in halves.forward and block.reason != EMPTY_REGION:
            found[node] = block
    return found


def _widens(node: fx.Node) -> bool:
    """Whether a call is a matrix product with at least 1.5 times its operand's elements.

    For a call outside `PRODUCTS`, the shapes decide whether it is a product.
    """
    if node.target in PRODUCTS:
        return is_widened(node)
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
    module = module_of(node)
    groups = [
        value
        for value in node.all_input_nodes
        if numel(value) and not value.meta["val"].is_floating_point()
    ]
    reason = (
        "multiplies rows group by group, and the rows of a group depend on values"
        if groups
        else "has no rule for rows"
    )
    return Refusal(
        call=InseparableError(node, reason).call, module=module, reason=reason, block=module
    )


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
