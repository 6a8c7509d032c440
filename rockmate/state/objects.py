"""State of Python objects: what a forward may read and change without an op.

These are attributes of modules, containers and objects that are reached from these or from other
roots, generators of random numbers among them. Their present content is taken; later all of it is
put back, or compared with another content.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import enum
import logging
import pickle
import random
import re
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rockmate.state.contents import ATOMS, Both, is_same_content, items_of
from rockmate.state.random_state import as_tensor

MOST_OBJECTS = 1 << 16
_MOST_ELEMENTS = 4096
"""Of a container whose elements are followed."""
_MOST_COPIED = 1 << 18
"""Elements of a container that are put back: a longer one is data."""
_MOST_BYTES = 1 << 20
"""Of an array or another buffer that is copied: a larger one is data."""
LIBRARIES = frozenset((
    "torch", "builtins", "logging", "threading", "types", "weakref", "concurrent", "asyncio",
    "multiprocessing", "_thread", "_io", "io", "rockmate", "numpy", "_weakref", "_abc", "abc",
    "functools", "inspect", "typing", "re", "lightning", "pytorch_lightning", "rich", "tqdm",
    "queue", "_queue",
))  # fmt: skip
"""Whose objects are not followed: they have state of their own kind, or point everywhere."""
_OF_OTHERS = (
    nn.Module, torch.Tensor, type, enum.Enum, types.ModuleType, BaseException, logging.Filterer,
)  # fmt: skip
"""Kinds that are not followed: what listens to loggers hears of the trials themselves."""
_SIZED = (OrderedDict, dict, list, deque, set, tuple)
_CONTAINERS = (dict, (list, deque), set)
_FIELD_NAME, _POINTERS = re.compile(r":\w+:"), frozenset("OPXZz&")  # in formats of buffers


class Handler(NamedTuple):
    """What to do with objects of one type.

    Attributes:
        take: gives the content: a mapping, a sequence, or what is compared as a whole.
        put: has an object have a content.
        is_named: whether the keys of the content are names of attributes.
    """

    take: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    is_named: bool = False


class Objects:
    """Objects that are reached from some roots, with their content at one time.

    Attributes:
        found: address -> object, handler and content.
        tensors: address -> tensor, of those that are attributes or elements.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        *,
        follows: Callable[[type], Handler | None],
        most: int = MOST_OBJECTS,
    ) -> None:
        """Takes the present content.

        Args:
            roots: where to begin.
            follows: the handler of a type; None if its objects are not followed.
            most: how many objects are followed.
        """
        self.found: dict[int, tuple[Any, Handler, Any]] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self._seen: dict[int, Any] = {}  # tuples, which need no content
        pending = [each for each in roots if type(each) not in ATOMS]
        while pending and len(self.found) < most:
            value = pending.pop()
            key, kind = id(value), type(value)
            if key in self.found or key in self._seen:
                continue
            if isinstance(value, torch.Tensor):
                self.tensors[key] = value
            if kind is tuple:
                self._seen[key] = value
                if len(value) <= _MOST_ELEMENTS:
                    pending += [each for each in value if type(each) not in ATOMS]
                continue
            handler = follows(kind)
            if (handler is None or handler is OF_ATTRIBUTES) and is_buffer(value):
                handler = _OF_BUFFER
            length = _own(kind).__len__(value) if isinstance(value, _SIZED) else 0
            if handler is None or length > _MOST_COPIED:
                continue
            content = handler.take(value)
            self.found[key] = value, handler, content
            if length <= _MOST_ELEMENTS:
                pending += [each for each in items_of(content) if type(each) not in ATOMS]

    def content_of(self, value: Any) -> Any:
        """The content of an object that was followed; None of others."""
        found = self.found.get(id(value))
        return None if found is None else found[2]

    def again(self, follows: Callable[[type], Handler | None]) -> Objects:
        """The same ones, and what is reached from them now, with their present content."""
        return Objects([value for value, *_ in self.found.values()], follows=follows)

    def changed(self) -> Iterator[tuple[Any, str]]:
        """Those that have another content, each with the name of what differs in it."""
        for value, handler, content in self.found.values():
            now = handler.take(value)
            if not is_same_content(now, content):
                name = "the content"
                if isinstance(now, dict):
                    names = (
                        each for each in now | content if now.get(each) is not content.get(each)
                    )
                    name = str(next(names, name))
                yield value, name

    def has_changed(self) -> bool:
        """Whether any of them has another content."""
        return any(True for _ in self.changed())

    def restore(self) -> None:
        """Puts all of it back."""
        for value, handler, content in self.found.values():
            handler.put(value, content)


# --- handlers -------------------------------------------------------------------------------------


@cache
def objects_of_python(kind: type) -> Handler | None:
    """The handler of a type, but of modules, tensors, functions and classes."""
    for base, handler in _HANDLERS:
        if issubclass(kind, base):
            has_both = base in _CONTAINERS and _has_dict(kind)
            return _with_attributes(handler) if has_both else handler
    library = kind.__module__.partition(".")[0]
    is_followed = library not in LIBRARIES and not issubclass(kind, _OF_OTHERS)
    return OF_ATTRIBUTES if is_followed and (_has_dict(kind) or _slots(kind)) else None


def _has_dict(kind: type) -> bool:
    return bool(kind.__dictoffset__)


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Names of attributes that a class keeps beside a `__dict__`."""
    members = (vars(each).items() for each in kind.__mro__ if each is not object)
    return tuple(
        name
        for each in members
        for name, value in each
        if isinstance(value, types.MemberDescriptorType)
    )


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Any = _Absent()
"""Stands for an attribute that an object does not have."""


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(vars(value)) if _has_dict(type(value)) else {}
    for name in _slots(type(value)):
        item = getattr(value, name, ABSENT)
        if item is not ABSENT:
            found[name] = item
    return found


def _put_attributes(value: Any, content: dict[str, Any]) -> None:
    if _has_dict(type(value)):
        slots = _slots(type(value))
        own = {name: each for name, each in content.items() if name not in slots}
        put_dict(vars(value), own if slots else content)
    for name in _slots(type(value)):
        if name not in content:
            if hasattr(value, name):
                delattr(value, name)
        elif getattr(value, name, ABSENT) is not content[name]:
            object.__setattr__(value, name, content[name])


@cache
def _own(kind: type) -> Any:
    """The class of Python that a container is of, whose methods do no more than they say."""
    return next(each for each in _SIZED if issubclass(kind, each))


def put_dict(value: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Gives a dict its items back, in their order."""
    own = _own(type(value))
    if not content and not own.__len__(value):
        return
    if len(content) == own.__len__(value) and all(
        (name is known or name == known) and each is before
        for (name, each), (known, before) in zip(own.items(value), content.items(), strict=True)
    ):
        return
    own.clear(value)
    own.update(value, content)


def _put_list(value: list[Any] | deque[Any], content: Sequence[Any]) -> None:
    own = _own(type(value))
    if [*map(id, own.__iter__(value))] != [*map(id, content)]:
        own.clear(value)
        own.extend(value, content)


def _put_set(value: set[Any], content: frozenset[Any]) -> None:
    if set.__ne__(value, content):
        set.clear(value)
        set.update(value, content)


def keep(_: Any, __: Any) -> None:
    """Nothing can have changed."""


@cache
def _with_attributes(handler: Handler) -> Handler:
    """The handler of a container with attributes beside its items."""

    def take(value: Any) -> Both:
        return Both(handler.take(value), _attributes(value))

    def put(value: Any, content: Both) -> None:
        handler.put(value, content.items)
        _put_attributes(value, content.attributes)

    return Handler(take, put)


def _set_numpy(value: np.random.Generator, state: bytes) -> None:
    value.bit_generator.state = pickle.loads(state)


def _array_bytes(value: np.ndarray[Any, Any]) -> bytes | None:
    is_small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
    return value.tobytes() if is_small else None


def _put_array(value: np.ndarray[Any, Any], content: bytes | None) -> None:
    if content is not None and value.flags.writeable and value.tobytes() != content:
        value[...] = np.frombuffer(content, value.dtype).reshape(value.shape)


def is_buffer(value: Any) -> bool:
    """Whether a value gives memory to write numbers to: a `bytearray`, an array of `ctypes`."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return False
    has_pointers = not _POINTERS.isdisjoint(_FIELD_NAME.sub("", view.format))
    return view.contiguous and not (view.readonly or has_pointers)


def _buffer_bytes(value: Any) -> bytes | None:
    view = memoryview(value)
    return view.tobytes() if view.nbytes <= _MOST_BYTES else None


def _put_buffer(value: Any, content: bytes | None) -> None:
    now = _buffer_bytes(value)
    if content is None or now == content:
        return
    if now is None or len(now) != len(content):  # none but these two have another length
        value[:] = array.array(value.typecode, content) if hasattr(value, "typecode") else content
        return
    np.frombuffer(value, np.uint8)[:] = np.frombuffer(content, np.uint8)


def _put_variable(value: contextvars.ContextVar[Any], content: list[Any]) -> None:
    if content[0] is ABSENT and value.get(ABSENT) is not ABSENT:
        with contextlib.suppress(LookupError):  # it can only be unset by its default
            value.set(contextvars.Context().run(value.get))
    elif value.get(ABSENT) is not content[0]:
        value.set(content[0])


_OF_BUFFER = Handler(_buffer_bytes, _put_buffer)
OF_ATTRIBUTES = Handler(_attributes, _put_attributes, is_named=True)
_HANDLERS: Sequence[tuple[Any, Handler]] = (
    (types.SimpleNamespace, OF_ATTRIBUTES),
    (threading.local, Handler(lambda value: dict(vars(value)),
                              lambda value, known: put_dict(vars(value), known), is_named=True)),
    (contextvars.ContextVar, Handler(lambda value: [value.get(ABSENT)], _put_variable)),
    (dict, Handler(lambda value: dict(_own(type(value)).items(value)), put_dict)),
    ((list, deque), Handler(lambda value: list(_own(type(value)).__iter__(value)), _put_list)),
    (set, Handler(lambda value: frozenset(set.__iter__(value)), _put_set)),
    (tuple, Handler(lambda value: list(tuple.__iter__(value)), keep)),
    (np.ndarray, Handler(_array_bytes, _put_array)),
    (
        torch.Generator,
        Handler(
            lambda value: value.get_state().numpy().tobytes(),
            lambda value, state: value.set_state(as_tensor(state)),
        ),
    ),
    (random.Random, Handler(random.Random.getstate, random.Random.setstate)),
    (np.random.Generator,  # whose state is another dictionary whenever it is asked for
     Handler(lambda value: pickle.dumps(value.bit_generator.state), _set_numpy)),
    (np.random.RandomState, Handler(np.random.RandomState.get_state,
                                    np.random.RandomState.set_state)),
)  # fmt: skip
