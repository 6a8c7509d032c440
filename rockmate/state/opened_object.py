"""Any Python object as the parts that it holds, and a copy of it with other parts.

A batch may come in an object of a class of its own: a mapping that is no dict, a dataclass, a
graph. What it holds are its items and attributes. A copy is made as `copy.deepcopy` makes it, which
runs no constructor and follows what the class says of copies.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import math
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from rockmate._torch import pytree
from rockmate.errors import UnsupportedModelError

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, range,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
)  # fmt: skip
# What stands for itself.
_NAMED = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    nn.Module,
)  # fmt: skip
_CONTAINERS = (object, dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict)
_REDUCERS = {each.__reduce__ for each in _CONTAINERS}
_HEAP_TYPE = 1 << 9  # of `__flags__`; there is no public name for it


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf that is no tensor.

    Attributes:
        kind: its type. The type and the sign of zero count, since 1, 1.0 and True are equal in
            Python, as are 0.0 and -0.0, and not to a model.
        value: what it is compared by.
        held: what it is rebuilt as.
    """

    kind: Any
    value: Any
    held: Any = field(compare=False)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or another one that cannot be changed."""
    return isinstance(value, _PLAIN)


def constant_of(value: Any) -> Constant | None:
    """A value that holds no others, as a constant; None for any other."""
    if is_plain(value):
        is_negative_zero = type(value) is float and not value and math.copysign(1.0, value) < 0
        return Constant((float, "negative") if is_negative_zero else type(value), value, value)
    if isinstance(value, _NAMED):
        return Constant(type(value), value, value)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes()).digest()
        return Constant(type(value), (str(value.dtype), value.shape, digest), value)
    # A weak reference is to what holds it, as a rule.
    return Constant(type(value), None, value) if isinstance(value, weakref.ref) else None


def parts_of(value: Any) -> dict[tuple[str, Any], Any] | None:
    """The items and attributes of an object; None if they cannot be seen from Python."""
    cls = type(value)
    static = [each for each in cls.__mro__ if not each.__flags__ & _HEAP_TYPE]
    reduce = cls.__reduce__
    is_written_in_c = reduce not in _REDUCERS and not isinstance(reduce, types.FunctionType)
    if is_written_in_c or any(each not in _CONTAINERS for each in static):
        return None
    slots = [
        name
        for each in cls.__mro__
        for name in _names(vars(each).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    if isinstance(value, dict):
        items = dict(dict.items(value))
    elif isinstance(value, set | frozenset):
        items = dict(enumerate(sorted(value, key=repr)))
    elif isinstance(value, list | tuple | deque):
        items = dict(enumerate(value))
    elif not slots and not hasattr(value, "__dict__"):
        return None
    else:
        items = {}
    attributes = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
    named = {("attribute", name): attributes[name] for name in sorted(attributes, key=str)}
    return {("item", key): item for key, item in items.items()} | named


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


class Marker:
    """Stands for a tensor in a copy of an object."""


def copied_with(value: Any, replaced: dict[int, Any]) -> Any:
    """A copy of an object, with others in the place of those at some addresses.

    Raises:
        UnsupportedModelError: its class cannot be copied.
    """
    try:
        return _completed(copy.deepcopy(value, replaced), value, replaced)
    except Exception as error:
        if type(value).__base__ is not dict:
            raise cannot_copy(type(value)) from error
    # Its `__getattr__` knows keys alone, and raises for what `copy` asks for.
    made: dict[Any, Any] = dict.__new__(type(value))
    replaced[id(value)] = made
    for table, of in ((made, value), (vars(made), vars(value))):
        dict.update(table, {key: copied_with(each, replaced) for key, each in dict.items(of)})
    return made


def _completed(copied: Any, value: Any, replaced: dict[int, Any]) -> Any:
    """A copy in which all attributes are copies: a class's `__deepcopy__` may pass over some."""
    if not hasattr(type(copied), "__deepcopy__") or isinstance(copied, torch.Tensor):
        return copied
    own, before = (getattr(each, "__dict__", {}) for each in (copied, value))
    for name, each in own.items():
        if each is before.get(name):
            own[name] = copy.deepcopy(each, replaced)
        else:
            _completed(each, before.get(name), replaced)
    return copied


def cannot_copy(cls: type) -> UnsupportedModelError:
    """The error for an object whose class makes copies that are none."""
    return UnsupportedModelError(
        f"an object of the class {cls.__module__}.{cls.__qualname__} cannot be copied with other "
        "tensors in it (copy.deepcopy). Pass or return its tensors in a tuple or dict."
    )


def tensors_within(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested object, as far as they can be seen, each once."""
    seen: dict[int, Any] = {}

    def look_into(leaf: Any) -> None:
        if id(leaf) in seen or constant_of(leaf) is not None:
            return
        seen[id(leaf)] = leaf
        parts = None if isinstance(leaf, torch.Tensor) else parts_of(leaf)
        for each in pytree.tree_leaves(list(parts.values())) if parts else ():
            look_into(each)

    for leaf in pytree.tree_leaves(value):
        look_into(leaf)
    return [each for each in seen.values() if isinstance(each, torch.Tensor)]
