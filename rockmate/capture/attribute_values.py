"""Values of attributes as data that can be compared later, whatever happens to the objects."""

from __future__ import annotations

import hashlib
import types
from collections import deque
from typing import Any

import numpy as np
import torch

from rockmate._torch.fake import is_plain
from rockmate._torch.storage import version_of
from rockmate.capture.deferred_values import Deferred
from rockmate.state.opened_object import copied_with

_PLAIN = frozenset({type(None), bool, int, complex, str, bytes})


class _Same:
    """An object that is compared by identity; it stays alive, so that its address is its own."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    __hash__ = None  # pyright: ignore[reportAssignmentType]


WATCHED_KIND = "_rockmate_watched_kind"
"""Of a class that stands for a container's while what is done with it is noted: that of its own."""


def snapshot(value: Any, within: tuple[int, ...] = ()) -> Any:
    """A copy of `value` for comparison: plain values with their types, containers item by item.

    Any other object stands for itself. What the forward reads of such an object is watched by the
    names of its attributes.

    Args:
        value: what is copied.
        within: addresses of the containers around it, since a container may contain itself.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex()  # NaN differs from itself, and 0.0 equals -0.0
    kind = getattr(kind, WATCHED_KIND, kind)
    if id(value) in within:
        return kind, len(within)
    inner = (*within, id(value))
    if isinstance(value, dict):
        return kind, [(key, snapshot(item, inner)) for key, item in dict.items(value)]
    if isinstance(value, list | tuple | deque):
        return kind, [snapshot(item, inner) for item in items_of(value)]
    if isinstance(value, set | frozenset):
        return kind, frozenset(value)
    if isinstance(value, types.SimpleNamespace):
        return kind, snapshot(vars(value), inner)
    if isinstance(value, torch.Tensor) and is_plain(value):
        # An optimizer changes parameters in place, which are inputs of each step.
        is_input = isinstance(value, torch.nn.Parameter)
        return kind, [_Same(value), 0 if is_input else version_of(value)]
    if isinstance(value, np.ndarray):
        digest = hashlib.blake2b(value.tobytes()).digest()
        return kind, value.dtype, value.shape, digest
    return _Same(value)


def is_mutable(value: Any) -> bool:
    """Whether the snapshot of one and the same object can change."""
    if isinstance(value, tuple):
        return any(map(is_mutable, value))
    return is_container(value) or isinstance(value, np.ndarray | torch.Tensor)


def is_container(value: Any) -> bool:
    """Whether an object holds others and can be changed."""
    return isinstance(value, list | dict | set | deque | types.SimpleNamespace)


def items_of(value: Any) -> list[Any]:
    """What a container or tuple holds; empty for any other object."""
    if isinstance(value, types.SimpleNamespace):
        return list(vars(value).values())
    if isinstance(value, dict):
        return list(dict.values(value))
    # A subclass may iterate in a way of its own.
    kinds = (list, tuple, set, frozenset, deque)
    kind: Any = next((each for each in kinds if isinstance(value, each)), None)
    return [] if kind is None else list(kind.__iter__(value))


def copied(value: Any) -> Any:
    """A copy of a container and of those in it; other objects are the same."""
    same: dict[int, Any] = {}
    seen, pending = set[int](), [value]
    while pending:
        each = pending.pop()
        if not (is_container(each) or isinstance(each, tuple)):
            same[id(each)] = each
        elif id(each) not in seen:
            seen.add(id(each))
            pending += [*items_of(each), *(dict.keys(each) if isinstance(each, dict) else ())]
    return copied_with(value, same)


def traced_in(value: Any, seen: dict[int, Any] | None = None) -> list[Any]:
    """The tensors and symbolic numbers in a value, its containers, and attributes of objects.

    Of a deferred number, it is the tensor that is read.

    Args:
        value: where they are looked for.
        seen: objects that have been looked at, by address.
    """
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return [value]
    if isinstance(value, Deferred):
        return [value.tensor]
    known = isinstance(value, type | torch.nn.Module | types.FunctionType | types.ModuleType)
    if known or id(value) in seen:
        return []
    seen[id(value)] = value
    items = items_of(value) or list(getattr(value, "__dict__", {}).values())
    return [found for item in items for found in traced_in(item, seen)]


def text_of(taken: Any) -> str:
    """A snapshot of a plain value in words; a note for any other."""
    kind = taken[0] if isinstance(taken, tuple) else None
    if kind is float:
        return repr(float.fromhex(taken[1]))
    return repr(taken[1]) if kind in _PLAIN else "another value"
