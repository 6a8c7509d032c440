"""Iterators that a forward reaches: a run that is undone or repeated must not use them up."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from rockmate.errors import UnsupportedModelError
from rockmate.state.contents import Both, items_of
from rockmate.state.objects import Objects

_MODULES = ("builtins", "itertools")


def is_iterator(value: Any) -> bool:
    """Whether a value gives its items once: a generator, or an iterator of Python's own."""
    kind = type(value)
    if kind in (types.GeneratorType, _Guard):
        return True
    return kind.__module__ in _MODULES and hasattr(kind, "__next__")


class IteratorError(UnsupportedModelError):
    """A run that is undone would use an iterator up."""


class _Guard(Generator[Any, Any, None]):
    """Stands for an iterator, and tells of each item that is taken."""

    def __init__(self, iterator: Any, place: str, note: Callable[[str], None]) -> None:
        self.iterator, self._place, self._note = iterator, place, note

    def send(self, value: Any) -> Any:
        self._note(self._place)
        return next(self.iterator) if value is None else self.iterator.send(value)

    def throw(self, *error: Any) -> Any:
        self._note(self._place)
        return self.iterator.throw(*error)


def _refuse(place: str) -> None:
    raise IteratorError(
        f"the forward takes an item of the iterator {place}, which a capture or a trial "
        "would use up. Take the item outside of the model, and pass it as an argument."
    )


@contextmanager
def iterators_guarded(objects: Objects, note: Callable[[str], None] = _refuse) -> Iterator[None]:
    """Has iterators that are attributes, elements or global names tell of items that are taken.

    Iterators within tuples are left.

    Args:
        objects: those that the run can reach.
        note: gets the name of the iterator; by default it raises `IteratorError`, so that a run
            which is undone gets none.
    """

    def guard(name: Any, value: Any) -> Any:
        return _Guard(value, f"{name!r}", note) if is_iterator(value) else value

    guarded = []
    for value, handler, content in objects.found.values():
        if any(map(is_iterator, items_of(content))):
            guarded.append((value, handler))
            handler.put(value, _replaced(content, guard))
    try:
        yield
    finally:
        for value, handler in guarded:
            handler.put(value, _replaced(handler.take(value), _released))


def _released(_: Any, value: Any) -> Any:
    return value.iterator if isinstance(value, _Guard) else value


def _replaced(content: Any, replace: Any) -> Any:
    if isinstance(content, dict):
        return {name: replace(name, each) for name, each in content.items()}
    if isinstance(content, list):
        return [replace(at, each) for at, each in enumerate(content)]
    if isinstance(content, Both):
        return Both(*(_replaced(each, replace) for each in content))
    return content
