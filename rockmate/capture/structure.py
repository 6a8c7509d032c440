"""Nested inputs and outputs as a flat list of leaves, and back.

PyTorch's pytrees know tuples, lists, mappings, named tuples and whatever a library has registered
(Hugging Face registers its `ModelOutput` classes). Plain dataclasses are leaves to them, so those
are opened here, field by field. Tensors are separated from the other leaves, which are constants of
the plan.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass
from typing import Any

import torch

from rockmate._torch import pytree
from rockmate.errors import UnsupportedModelError

_CONSTANT_TYPES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _OpenedDataclass:
    """Stands where a plain dataclass stood: its class and the structure of its fields."""

    cls: type
    field_names: tuple[str, ...]
    fields: Structure


@dataclass(frozen=True, slots=True)
class _TensorSlot:
    """Stands where tensor number `index` stood."""

    index: int


@dataclass(frozen=True, slots=True)
class _Constant:
    """A leaf that is no tensor.

    Its type and the sign of zero count, since 1, 1.0 and True are equal in Python, as are 0.0 and
    -0.0, and not to a model.
    """

    kind: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nested object: where its tensors go, and every leaf that is no tensor."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def rebuild(self, tensors: list[Any]) -> Any:
        """The nested object with `tensors` in the places of the original's tensors."""
        return pytree.tree_unflatten([_restore(leaf, tensors) for leaf in self.leaves], self.spec)

    def without_tensors(self, keep: set[int]) -> Structure:
        """The same structure with `None` for every tensor whose index is not in `keep`.

        Those left are renumbered.
        """
        order = {index: position for position, index in enumerate(sorted(keep))}
        return Structure(self.spec, tuple(_renumber(leaf, order) for leaf in self.leaves))


def flatten(value: Any, *, what: str) -> tuple[list[torch.Tensor], Structure]:
    """Separates the tensors of a nested object from its structure.

    Args:
        value: any nesting of tuples, lists, mappings, registered pytrees and dataclasses.
        what: how an error calls the object ("the model's output").

    Raises:
        UnsupportedModelError: a leaf is neither a tensor nor a plain constant.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _flatten_into(value, tensors, what)


def flatten_further(value: Any, tensors: list[torch.Tensor], *, what: str) -> Structure:
    """The structure of one more object; its tensors are added to those of others.

    Args and errors are those of `flatten`.
    """
    return _flatten_into(value, tensors, what)


def _flatten_into(value: Any, tensors: list[torch.Tensor], what: str) -> Structure:
    leaves, spec = pytree.tree_flatten(value)
    return Structure(spec, tuple(_open(leaf, tensors, what) for leaf in leaves))


def _open(leaf: Any, tensors: list[torch.Tensor], what: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        tensors.append(leaf)
        return _TensorSlot(len(tensors) - 1)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = tuple(field.name for field in dataclasses.fields(leaf) if field.init)
        fields = _flatten_into([getattr(leaf, name) for name in names], tensors, what)
        return _OpenedDataclass(type(leaf), names, fields)
    if isinstance(leaf, _CONSTANT_TYPES):
        return _Constant(_kind_of(leaf), leaf)
    msg = (
        f"{what} holds a {type(leaf).__module__}.{type(leaf).__qualname__}, which is neither a "
        "tensor, a constant, a dataclass "
        "nor a registered pytree. Return plain containers of tensors, or register the class with "
        "torch.utils._pytree."
    )
    raise UnsupportedModelError(msg)


def _kind_of(leaf: Any) -> Any:
    is_negative_zero = type(leaf) is float and not leaf and math.copysign(1.0, leaf) < 0
    return (float, "negative") if is_negative_zero else type(leaf)


def _restore(leaf: Any, tensors: list[Any]) -> Any:
    if isinstance(leaf, _TensorSlot):
        return tensors[leaf.index]
    if isinstance(leaf, _OpenedDataclass):
        return leaf.cls(**dict(zip(leaf.field_names, leaf.fields.rebuild(tensors), strict=True)))
    return leaf.value if isinstance(leaf, _Constant) else leaf


def _renumber(leaf: Any, order: dict[int, int]) -> Any:
    if isinstance(leaf, _TensorSlot):
        return _TensorSlot(order[leaf.index]) if leaf.index in order else None
    if isinstance(leaf, _OpenedDataclass):
        fields = Structure(
            leaf.fields.spec, tuple(_renumber(inner, order) for inner in leaf.fields.leaves)
        )
        return _OpenedDataclass(leaf.cls, leaf.field_names, fields)
    return leaf
