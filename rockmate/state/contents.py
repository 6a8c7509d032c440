"""The content of objects at one time, as it is held to be put back or compared."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))
"""Types of values that do not change and lead nowhere."""


class Both(NamedTuple):
    """The content of a container with attributes of its own.

    Attributes:
        items: of the container.
        attributes: by name.
    """

    items: Any
    attributes: dict[str, Any]


class TensorState(NamedTuple):
    """What a tensor is beside its numbers.

    Attributes:
        memory: a tensor that has its memory.
        requires_grad: of the tensor.
        gradient: its `.grad`.
        hooks: after its gradient's accumulation, and of its gradient; None where there are none.
        attributes: its own attributes in Python.
    """

    memory: torch.Tensor
    requires_grad: bool
    gradient: torch.Tensor | None
    hooks: tuple[dict[int, Any] | None, dict[int, Any] | None]
    attributes: dict[str, Any]


def items_of(content: Any) -> Collection[Any]:
    """What a content leads to."""
    if isinstance(content, dict):
        return content.values()
    if isinstance(content, list):
        return content
    if isinstance(content, Both):
        found = items_of(content.items)
        return [*found, *content.attributes.values()] if content.attributes else found
    return content.attributes.values() if isinstance(content, TensorState) else ()


def has_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same part of the same memory, in the same layout."""
    if tensor.layout != torch.strided or other.layout != torch.strided:
        return tensor.layout == other.layout
    return (
        tensor.shape == other.shape
        and tensor.dtype == other.dtype
        and tensor.device == other.device
        and tensor.stride() == other.stride()
        and tensor.storage_offset() == other.storage_offset()
        and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def is_same_content(one: Any, other: Any) -> bool:
    """Whether contents have the same objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, TensorState):
        return (
            has_same_memory(one.memory, other.memory)
            and one.requires_grad == other.requires_grad
            and one.gradient is other.gradient
            and one.hooks == other.hooks
            and is_same_content(one.attributes, other.attributes)
        )
    if isinstance(one, Both):
        return all(map(is_same_content, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _is_same_item(each, other[name]) for name, each in one.items()
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_same_item, one, other))
    return bool(repr(one) == repr(other)) if not isinstance(one, bytes) else one == other


def _is_same_item(one: Any, other: Any) -> bool:
    if one is other:
        return True
    kind = type(one)
    return kind in ATOMS and kind is type(other) and repr(one) == repr(other)
