"""Inserts calls into a joint graph during a rewrite, with the fake tensors of their results."""

from __future__ import annotations

import itertools
from math import prod

import torch
from torch import fx

from rockmate.capture.nodes import items_of
from rockmate.graph.chunking.loss_rules import MEAN, SUM, SUMMED_LOSSES, SUMMED_LOSSES_BACKWARD
from rockmate.graph.fake_values import insert_call
from rockmate.ops.kernels import target_weight

_aten = torch.ops.aten
HALF_PRECISION = {torch.float16, torch.bfloat16}
# Calls that create a constant tensor from a shape.
FILLS = {_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.empty.memory_format}
# The same from a tensor of that dtype and device, and a shape.
NEW_FILLS = {_aten.new_full.default, _aten.new_zeros.default, _aten.new_ones.default}
VIEWS = {
    _aten.t.default,
    _aten.view.default,
    _aten.transpose.int,
    _aten._unsafe_view.default,
    _aten.detach.default,
}


def is_fill(node: fx.Node) -> bool:
    """Whether a value is a constant of a shape."""
    return node.target in FILLS or node.target in NEW_FILLS


def sum_losses(graph: fx.Graph) -> None:
    """Rewrites each mean of a loss as a sum and a division.

    A mean over tokens is divided by their total weight, which depends on the targets alone.
    """
    for node in list(graph.nodes):
        if node.target in SUMMED_LOSSES or node.target in SUMMED_LOSSES_BACKWARD:
            sum_elements(graph, node)
        if node.target not in (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default):
            continue
        scores, target, weight, reduction, ignore_index = node.args
        assert isinstance(scores, fx.Node)
        items = items_of(node)
        with graph.inserting_before(node):
            total = insert_call(
                graph,
                target_weight,
                (target, weight, ignore_index, scores.meta["val"].dtype),
                like=node,
            )
        if 1 in items:
            items[1].replace_all_uses_with(total)
            graph.erase_node(items[1])
        if reduction == MEAN and 0 in items:
            node.args = (scores, target, weight, SUM, ignore_index)
            with graph.inserting_after(items[0]):
                mean = insert_call(graph, _aten.div.Tensor, (items[0], total), like=items[0])
            items[0].replace_all_uses_with(
                mean, delete_user_cb=lambda user, mean=mean: user is not mean
            )


def sum_elements(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrites a mean over elements as a sum divided by the number of elements.

    The gradient of the mean is the gradient of the sum. Its incoming gradient is divided by the
    number of elements.
    """
    is_backward = node.target in SUMMED_LOSSES_BACKWARD
    place = SUMMED_LOSSES_BACKWARD[node.target] if is_backward else SUMMED_LOSSES[node.target]
    operands = [each for each in node.args[is_backward:place] if isinstance(each, fx.Node)]
    args = [*node.args, *[None] * (place - len(node.args)), *[MEAN] * (len(node.args) <= place)]
    if args[place] != MEAN:
        return
    num_elements = prod(torch.broadcast_shapes(*(each.meta["val"].shape for each in operands)))
    args[place] = SUM
    if is_backward:
        with graph.inserting_before(node):
            args[0] = insert_call(graph, _aten.div.Scalar, (args[0], num_elements), like=node)
        node.args = tuple(args)
        return
    node.args = tuple(args)
    with graph.inserting_after(node):
        mean = insert_call(graph, _aten.div.Scalar, (node, num_elements), like=node)
    node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


def producer_of(value: fx.Node) -> fx.Node:
    """Returns the call that allocates the storage of `value`."""
    while value.target in VIEWS:
        value = value.all_input_nodes[0]
    return value


def chunk_bounds(num_rows: int, num_chunks: int) -> list[tuple[int, int]]:
    """Returns the first row of each chunk and the row after its last."""
    edges = [num_rows * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return list(itertools.pairwise(edges))


def sort_topologically(graph: fx.Graph) -> None:
    """Moves each node after its operands, as early as possible. The order is the same otherwise."""
    order = list(graph.nodes)
    missing = {node: len(node.all_input_nodes) for node in order}
    reached: set[fx.Node] = set()
    last: fx.Node | None = None
    for node in order:
        reached.add(node)
        pending = [node] if not missing[node] else []
        while pending:
            placed = pending.pop()
            if last is not None:
                last.append(placed)
            last = placed
            for user in placed.users:
                missing[user] -= 1
            pending += [
                user for user in reversed(placed.users) if not missing[user] and user in reached
            ]
