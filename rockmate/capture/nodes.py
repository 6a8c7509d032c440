"""Readers of a captured graph's nodes: tensors, storages, layouts, and names of calls.

A node's `meta["val"]` is what its call returns: a fake tensor, or a tuple or list with some. Fake
tensors that share memory share a storage, whose identity is stable as long as one of them lives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any

import torch
from torch import fx

from rockmate._torch.dispatch import is_op
from rockmate._torch.storage import storage_id
from rockmate.ops.kernel_layouts import as_tuple
from rockmate.ops.rng import is_random

_ADD = torch.ops.aten.add.Tensor


def call_name(node: fx.Node) -> str:
    """The name of the op or function that a node calls."""
    target = node.target
    return str(target) if is_op(target) else getattr(target, "__name__", str(target))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The dense fake tensors that a node returns; sparse ones have no storage."""
    return [
        item
        for item in as_tuple(node.meta.get("val"))
        if isinstance(item, torch.Tensor) and item.layout is torch.strided
    ]


def storage_ids(node: fx.Node) -> list[int]:
    """The identity of the storage of each tensor in `tensors_of(node)`."""
    return [storage_id(tensor) for tensor in tensors_of(node)]


def layout_of(tensor: torch.Tensor) -> Hashable:
    """What two views of one storage must share to hold the same numbers, and the device."""
    lazy_bits = tensor.is_conj(), tensor.is_neg()
    shape, is_dense = tuple(tensor.shape), tensor.layout == torch.strided
    strides, offset = (tensor.stride(), tensor.storage_offset()) if is_dense else ((), 0)
    return tensor.dtype, tensor.device, tensor.layout, shape, strides, offset, lazy_bits


def calls_in(graph: fx.Graph, target: Any = None) -> list[fx.Node]:
    """The calls of a graph, or of a target in it, in order."""
    if target is not None:
        return list(graph.find_nodes(op="call_function", target=target))
    return [node for node in graph.nodes if node.op == "call_function"]


def is_pointwise(node: fx.Node) -> bool:
    """Whether PyTorch says that each element of the result depends on one of each operand."""
    is_marked = is_op(node.target) and torch.Tag.pointwise in node.target.tags
    return is_marked and not is_random(node.target) and isinstance(node.meta["val"], torch.Tensor)


def reads_no_values(node: fx.Node) -> bool:
    """Whether a call makes a tensor like its argument, as `zeros_like` and `new_ones` do."""
    name = call_name(node).removeprefix("aten.").partition(".")[0]
    made = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"}
    return name in made or name.startswith("new_")


def sums_of(value: Any) -> list[fx.Node]:
    """The additions of tensors in a row that a value is the result of, the last one first."""
    found = []
    while isinstance(value, fx.Node) and value.target is _ADD and not value.kwargs:
        if not isinstance(value.args[1], fx.Node):
            break
        found.append(value)
        value = value.args[0]
    return found


def ancestors(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes themselves and all nodes that they depend on."""
    return reached(ends, lambda node: node.all_input_nodes)


def reached(
    starts: Iterable[fx.Node],
    step: Callable[[fx.Node], Iterable[fx.Node]],
    within: Container[fx.Node] | None = None,
) -> set[fx.Node]:
    """The nodes of `within`, or of all, on paths of `step` from `starts` that stay in it."""
    found: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node not in found and (within is None or node in within):
            found.add(node)
            pending += step(node)
    return found


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is an input of the backward: the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def items_of(node: fx.Node) -> dict[Any, fx.Node]:
    """The items of a call's results that are read, by index."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}
