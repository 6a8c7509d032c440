"""Tensors in values, and the plain tensors and storages that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rockmate._torch.pytree import tree_leaves, tree_map
from rockmate._torch.storage import storage_id
from rockmate._torch.subclasses import is_wrapper, wrapped_parts
from rockmate.state.opened_object import tensors_within

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are no wrappers of others."""
_SCALARS = (bool, int, float, str)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself as a rule, none if it is sparse."""
    if tensor.layout != torch.strided:
        return []
    if not is_wrapper(tensor):
        return [tensor]
    values = wrapped_parts(tensor)[0].values()
    tensors = [value for value in values if isinstance(value, torch.Tensor)]  # no device mesh
    return [part for value in tensors for part in parts_of(value)]


def storages_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Keys of the storages of a tensor, or of the tensors that it is made of."""
    if type(tensor) in PLAIN and tensor.layout == torch.strided:
        return (storage_id(tensor),)
    return tuple(storage_id(part) for part in parts_of(tensor))


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, 1 for dimensions of one element, where they do not matter."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple([stride if size > 1 else 1 for size, stride in pairs])


def with_attributes_of(tensor: torch.Tensor, stand_in: Any) -> torch.Tensor:
    """What runs in the place of a tensor, with the attributes that users have set on that one."""
    stand_in.__dict__ = vars(tensor)
    return stand_in


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested containers and objects, in their order.

    Each call of a frame asks several times, and arguments are tuples of tensors as a rule.
    """
    kind = type(value)
    if kind in PLAIN:
        return [value]
    if kind is tuple or kind is list:
        return [tensor for each in value for tensor in tensors_in(each)]
    if kind is dict:
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    if value is None or kind in _SCALARS:
        return []
    found: list[torch.Tensor] = []
    for each in tree_leaves(value):
        found += [each] if isinstance(each, torch.Tensor) else tensors_within(each)
    return found


def with_changed(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested containers with each leaf changed.

    Each second run of a frame asks, and PyTorch's own way takes five times as long for arguments as
    they are as a rule.

    Args:
        change: of a leaf, tensor or not.
        value: the containers.
    """
    kind = type(value)
    if kind in PLAIN:
        return change(value)
    if kind is tuple or kind is list:
        return kind([with_changed(change, each) for each in value])
    if kind is dict:
        return {name: with_changed(change, each) for name, each in value.items()}
    return tree_map(change, value)
