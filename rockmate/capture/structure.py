"""Nested inputs and outputs as a flat list of leaves, and back.

PyTorch's pytrees know tuples, lists, mappings, named tuples and whatever a library has registered
(Hugging Face registers its `ModelOutput` classes). Any other object is a leaf to them, so those
are opened in `opened_object`. Tensors are separated from the other leaves, which are constants of
the plan. `loss_of` is the one definition of a loss, for planned and for eager steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rockmate._torch import pytree
from rockmate.capture.deferred_values import Deferred
from rockmate.errors import UnsupportedModelError
from rockmate.state.opened_object import (
    Constant,
    Marker,
    cannot_copy,
    constant_of,
    copied_with,
    is_plain,
    parts_of,
)

_SAME = "the same tensor"


@dataclass(frozen=True, slots=True)
class _TensorSlot:
    """Stands where tensor number `index` stood, or what `read` gives of it."""

    index: int
    read: Callable[[torch.Tensor], Any] | None = None


@dataclass(frozen=True, slots=True)
class _Opened:
    """Stands where an object stood that holds tensors, and no pytree knows.

    Attributes:
        cls: its class.
        names: keys of its items, names of its attributes.
        inner: the structure of those, as a list.
        template: a copy of it with markers in the place of its tensors.
        markers: those, in the order of the tensors.
        held: what is the same object in each copy, by address.
    """

    cls: type
    names: tuple[Any, ...]
    inner: Structure
    template: Any = field(default=None, compare=False, repr=False)
    markers: tuple[Marker, ...] = field(default=(), compare=False, repr=False)
    held: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, value: Any, names: tuple[Any, ...], inner: Structure, given: list[Any]) -> _Opened:
        """Takes an object apart, in which the given tensors are."""
        markers = tuple(Marker() for _ in given)
        held = {id(each): each for each in inner.held()}
        place = {id(tensor): marker for tensor, marker in zip(given, markers, strict=True)}
        template = copied_with(value, held | place)
        return cls(type(value), names, inner, template, markers, held)

    def rebuild(self, tensors: list[Any]) -> Any:
        """A copy of the object with other tensors."""
        given = [_restore(slot, tensors) for slot in self.inner.slots()]
        place = {id(marker): each for marker, each in zip(self.markers, given, strict=True)}
        result = copied_with(self.template, self.held | place)
        if all(isinstance(each, torch.Tensor) for each in given):
            found = flatten(result, what="a copy", takes_objects=True)[0]
            if [*map(id, found)] != [*map(id, given)] and len({*map(id, given)}) == len(given):
                raise cannot_copy(self.cls)
        return result


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nested object: where its tensors go, and every leaf that is no tensor."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def rebuild(self, tensors: list[Any]) -> Any:
        """The nested object with `tensors` in the places of the original's tensors."""
        return pytree.tree_unflatten([_restore(leaf, tensors) for leaf in self.leaves], self.spec)

    def shown(self, tensors: list[str]) -> Any:
        """The nested object, with texts in the places of its tensors and constants."""
        leaves = [_Shown(_text(leaf, tensors)) for leaf in self.leaves]
        try:
            return pytree.tree_unflatten(leaves, self.spec)
        except (AttributeError, TypeError, ValueError):  # a container that takes tensors alone
            return leaves

    def slots(self) -> list[_TensorSlot]:
        """Where its tensors go, in their order."""
        return [each for each in self._flat_leaves() if isinstance(each, _TensorSlot)]

    def held(self) -> list[Any]:
        """Its constants."""
        return [each.held for each in self._flat_leaves() if isinstance(each, Constant)]

    def _flat_leaves(self) -> list[Any]:
        """Its leaves, and those of objects among them."""
        return [
            inner
            for leaf in self.leaves
            for inner in (leaf.inner._flat_leaves() if isinstance(leaf, _Opened) else [leaf])
        ]

    def with_tensor_alone(self, index: int) -> Structure:
        """The same structure with `None` for every tensor but one, which is the first then."""

        def kept(leaf: Any) -> Any:
            if isinstance(leaf, _Opened):
                return replace(leaf, inner=leaf.inner.with_tensor_alone(index))
            is_slot = isinstance(leaf, _TensorSlot)
            return replace(leaf, index=0 if leaf.index == index else -1) if is_slot else leaf

        return Structure(self.spec, tuple(map(kept, self.leaves)))


def flatten(
    value: Any, *, what: str, takes_objects: bool = False, tensors: list[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], Structure]:
    """Separates the tensors of a nested object from its structure.

    Args:
        value: any nesting of tuples, lists, mappings, registered pytrees and objects.
        what: how an error calls the object ("the model's output").
        takes_objects: whether objects without tensors are constants, too, as functions and arrays.
            What a model makes may be another one in each run.
        tensors: of other objects, to which its tensors are added; None for none.

    Raises:
        UnsupportedModelError: a leaf is neither a tensor nor a constant, and what it holds cannot
            be seen.
    """
    tensors = [] if tensors is None else tensors
    return tensors, _Flattening(tensors, what, takes_objects=takes_objects).structure(value)


class _Flattening:
    """Takes one object apart."""

    def __init__(self, tensors: list[torch.Tensor], what: str, *, takes_objects: bool) -> None:
        self._tensors, self._what, self._takes_objects = tensors, what, takes_objects
        self._within: list[int] = []  # addresses of the objects around
        self._first = 0  # number of tensors before the outermost of those

    def structure(self, value: Any) -> Structure:
        """The structure of an object or of what is in one."""
        leaves, spec = pytree.tree_flatten(value, _is_size)
        return Structure(spec, tuple(map(self._open, leaves)))

    def _open(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._slot(leaf)
        if isinstance(leaf, Deferred):
            if self._within:
                raise self._refusal(leaf)
            leaf.is_delivered = True
            return replace(self._slot(leaf.tensor), read=leaf.read)
        constant = constant_of(leaf)
        if constant is not None and (self._takes_objects or is_plain(leaf)):
            return constant
        if id(leaf) in self._within:
            return Constant("around", self._within.index(id(leaf)), None)
        parts = None if constant is not None else parts_of(leaf)
        if parts is None:
            raise self._refusal(leaf)
        is_outermost, num_before = not self._within, len(self._tensors)
        self._first = num_before if is_outermost else self._first
        self._within.append(id(leaf))
        names, inner = tuple(parts), self.structure(list(parts.values()))
        self._within.pop()
        leaves = inner._flat_leaves()
        has_same = any(isinstance(each, Constant) and each.kind is _SAME for each in leaves)
        if not inner.slots() and not has_same:  # it is compared by what it holds
            if not self._takes_objects:
                raise self._refusal(leaf)
            return Constant(type(leaf), (names, inner), leaf)
        if is_outermost:
            return _Opened.of(leaf, names, inner, self._tensors[num_before:])
        return _Opened(type(leaf), names, inner)  # the object around it is copied with it

    def _refusal(self, leaf: Any) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._what} holds a {type(leaf).__module__}.{type(leaf).__qualname__}, which is "
            "neither a tensor, nor a constant, nor an object with tensors in its items and "
            "attributes. Pass and return these."
        )

    def _slot(self, tensor: torch.Tensor) -> Any:
        """The place of a tensor; an object holds the same one twice in its copies, too."""
        if self._within:
            for index in range(self._first, len(self._tensors)):
                if self._tensors[index] is tensor:
                    return Constant(_SAME, index - self._first, None)
        self._tensors.append(tensor)
        return _TensorSlot(len(self._tensors) - 1)


def _is_size(value: Any) -> bool:
    """Whether it is one of numbers: a pytree makes a tuple of it."""
    return type(value) is torch.Size and all(type(each) is int for each in value)


def _restore(leaf: Any, tensors: list[Any]) -> Any:
    if isinstance(leaf, _TensorSlot):
        tensor = tensors[leaf.index] if leaf.index >= 0 else None
        return tensor if leaf.read is None or tensor is None else leaf.read(tensor)
    if isinstance(leaf, _Opened):
        return leaf.rebuild(tensors)
    return leaf.held if isinstance(leaf, Constant) else leaf


def _text(leaf: Any, tensors: list[str]) -> str:
    if isinstance(leaf, _Opened):
        inner = [_text(each, tensors) for each in leaf.inner.leaves]
        return f"{leaf.cls.__name__}({', '.join(inner)})"
    return repr(_restore(leaf, tensors))


class _Shown(str):
    """A text without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def loss_of(output: Any, *, has_labels: bool) -> torch.Tensor | None:
    """The loss in a model's output; None if there is none.

    The loss is the entry `loss`, or the leading scalar of a tuple if the model was given `labels`.
    It has one element and requires a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and has_labels and isinstance(output, tuple | list) and output:
        loss = output[0] if getattr(output[0], "ndim", None) == 0 else None
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
        return None
    return loss
