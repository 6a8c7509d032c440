"""State of Python objects that a second run of a forward needs as it was, and leaves as it is.

A forward may read and change attributes and modes of its modules, containers and objects that are
reached from these or from its arguments, and generators of random numbers among them. When it runs
again in the backward, it reads what it read the first time, and its changes are thrown away.
"""

from __future__ import annotations

import enum
import operator
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rockmate._torch.members import RECURRENT_WEIGHTS

# Tables of members and hooks, and the forward that stands in for a frame's own.
_SKIPPED = (vars(nn.Module()).keys() | RECURRENT_WEIGHTS | {"forward"}) - {"training"}
_ATOMS = frozenset((type(None), bool, int, float, str, bytes, torch.dtype, torch.device))
_SIZED = (dict, list, deque, set, tuple)
_MOST_OBJECTS = 256
"""How many are followed from one call: a module may know the whole program."""
_MOST_ELEMENTS = 4096
"""Of a container that is followed: a longer one is data."""
_LIBRARIES = frozenset((
    "torch", "builtins", "logging", "threading", "functools", "types", "weakref", "concurrent",
    "asyncio", "multiprocessing", "_thread", "rockmate",
))  # fmt: skip
"""Whose objects are not followed: they have state of their own kind, or point everywhere."""


class _Handler(NamedTuple):
    """What to do with objects of one type.

    Attributes:
        take: gives the content.
        put: has an object have a content.
        inner: gives what is reached from an object.
    """

    take: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    inner: Callable[[Any], Iterable[Any]]


class ObjectState:
    """Attributes of modules, and what is reached from them and from other roots, at one time.

    Attributes:
        tensors: that are attributes or elements.
    """

    def __init__(self, modules: Sequence[nn.Module], roots: Iterable[Any] = ()) -> None:
        """Takes the present state.

        Args:
            modules: all of whose attributes count.
            roots: other objects.
        """
        self._owners = modules
        self.tensors: list[torch.Tensor] = []
        self._contents: list[tuple[Any, _Handler, Any]] = []
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        pending = [each for each in roots if type(each) not in _ATOMS]
        for module in modules:
            table = vars(module)
            values = {name: value for name, value in table.items() if name not in _SKIPPED}
            self._tables.append((table, values))
            pending += [value for value in values.values() if type(value) not in _ATOMS]
        if pending:
            self._follow(pending)

    def _follow(self, pending: list[Any]) -> None:
        seen: set[int] = set()
        while pending and len(seen) < _MOST_OBJECTS:
            value = pending.pop()
            kind = type(value)
            if id(value) in seen:
                continue
            seen.add(id(value))
            if issubclass(kind, torch.Tensor):
                self.tensors.append(value)
                continue
            if kind is tuple and len(value) <= _MOST_ELEMENTS:  # sizes and strides: most of all
                pending += [each for each in value if type(each) not in _ATOMS]
                continue
            handler = _handler(kind)
            if handler is None or (isinstance(value, _SIZED) and len(value) > _MOST_ELEMENTS):
                continue
            self._contents.append((value, handler, handler.take(value)))
            pending += [each for each in handler.inner(value) if type(each) not in _ATOMS]

    def restore(self) -> None:
        """Puts all of it back."""
        for value, handler, content in self._contents:
            handler.put(value, content)
        for table, values in self._tables:
            for name in table.keys() - values.keys() - _SKIPPED:
                del table[name]
            table.update(values)

    def has_changed(self) -> bool:
        """Whether anything is no more as it was."""
        for table, values in self._tables:
            now = {name: value for name, value in table.items() if name not in _SKIPPED}
            if not _is_same(tuple(now.items()), tuple(values.items())):
                return True
        return not all(
            _is_same(handler.take(value), content) for value, handler, content in self._contents
        )

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Has all stand as it did, for what runs within."""
        now = ObjectState(self._owners, [value for value, *_ in self._contents])
        self.restore()
        try:
            yield
        finally:
            now.restore()


@cache
def _handler(kind: type) -> _Handler | None:
    """Of a type; None if its objects are not followed."""
    for base, handler in _HANDLERS:
        if issubclass(kind, base):
            return handler
    library = kind.__module__.partition(".")[0]
    is_followed = library not in _LIBRARIES and not issubclass(kind, (nn.Module, type, enum.Enum))
    return _OF_ATTRIBUTES if is_followed and kind.__dictoffset__ else None


def _fill_dict(value: dict[Any, Any], content: Sequence[tuple[Any, Any]]) -> None:
    if len(value) != len(content) or not all(
        name == known and each is before
        for (name, each), (known, before) in zip(value.items(), content, strict=True)
    ):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        kind.update(value, content)


def _fill_list(value: list[Any] | deque[Any], content: Sequence[Any]) -> None:
    if len(value) != len(content) or not all(map(operator.is_, value, content)):
        value.clear()
        value.extend(content)


def _fill_set(value: set[Any], content: Sequence[Any]) -> None:
    if value != set(content):
        value.clear()
        value.update(content)


def _fill_attributes(value: Any, content: Sequence[tuple[Any, Any]]) -> None:
    _fill_dict(vars(value), content)


def _items(value: dict[Any, Any]) -> Sequence[tuple[Any, Any]]:
    return tuple(value.items())


def _is_same(one: Any, other: Any) -> bool:
    """Whether contents have the same objects, or equal atoms and states of generators."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == torch.uint8 and torch.equal(one, other)
    if type(one) in _ATOMS:
        return one == other
    return isinstance(one, dict) and pickle.dumps(one) == pickle.dumps(other)


def _nothing(_: Any) -> Sequence[Any]:
    return ()


def _keep(_: Any, __: Any) -> None:
    """Nothing can have changed."""


def _set_numpy(value: np.random.Generator, state: Any) -> None:
    value.bit_generator.state = state


_HANDLERS: Sequence[tuple[Any, _Handler]] = (
    (dict, _Handler(_items, _fill_dict, lambda value: list(value.values()))),
    ((list, deque), _Handler(tuple, _fill_list, lambda value: value)),
    (set, _Handler(tuple, _fill_set, _nothing)),
    (tuple, _Handler(_nothing, _keep, lambda value: value)),
    (
        torch.Generator,
        _Handler(torch.Generator.get_state, lambda value, state: value.set_state(state), _nothing),
    ),
    (random.Random, _Handler(random.Random.getstate, random.Random.setstate, _nothing)),
    (
        np.random.Generator,
        _Handler(lambda value: value.bit_generator.state, _set_numpy, _nothing),
    ),
    (np.random.RandomState, _Handler(np.random.RandomState.get_state,
                                     np.random.RandomState.set_state, _nothing)),
)  # fmt: skip
_OF_ATTRIBUTES = _Handler(
    lambda value: _items(vars(value)), _fill_attributes, lambda value: list(vars(value).values())
)
