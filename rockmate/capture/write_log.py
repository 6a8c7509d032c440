"""Containers that a forward only writes to, as lists and dicts of metrics.

For the duration of a trace, a copy whose methods note what they do stands in the places of each. If
nothing is read of it but items that the forward has set before, each planned forward repeats the
writes with the values of its step, and what the container holds does not matter to the plan.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch.overrides import TorchFunctionMode

from rockmate.capture.attribute_access import Place
from rockmate.capture.attribute_values import WATCHED_KIND
from rockmate.capture.deferred_values import Deferred, methods_of

_OF_MANY = ("extend", "extendleft", "__iadd__")
_WRITES = {
    list: ("append", "__setitem__", *_OF_MANY),
    deque: ("append", "appendleft", *_OF_MANY),
    dict: ("__setitem__", "update", "setdefault", "__ior__"),
}


@dataclass(frozen=True, slots=True)
class Write:
    """One call of a method of a container.

    Attributes:
        place: where the outermost container stands.
        path: keys that lead from that to the one that is written to.
        method: its name.
    """

    place: Place
    path: tuple[Any, ...]
    method: str

    def repeat(self, args: tuple[Any, ...]) -> None:
        """Does the same with the values of a step."""
        container = self.place.value()
        for key in self.path:
            container = container[key]
        getattr(container, self.method)(*args)


@dataclass(slots=True)
class WriteLog:
    """What one run of a forward does with containers at some places.

    Attributes:
        places: those of the containers.
        writes: in order, with the arguments.
        read: places of containers of which something is read.
    """

    places: Sequence[Place] = ()
    writes: list[tuple[Write, tuple[Any, ...]]] = field(default_factory=list)
    read: set[Place] = field(default_factory=set)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what runs within."""
        before = [(place, place.value()) for place in self.places]
        shared: dict[int, Any] = {}  # by address
        try:
            for place, value in before:
                if id(value) not in shared:
                    shared[id(value)] = _watched(value, place, (), self)
                place.put(shared[id(value)])
            with _GivenToTorch() if self.places else nullcontext():
                yield
        finally:
            for place, value in before:
                place.put(value)
                if shared[id(value)].noted[0] in self.read:
                    self.read.add(place)


class _GivenToTorch(TorchFunctionMode):
    """Functions of PyTorch read the items of a list past its methods."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in (*args, *kwargs.values()):
            if type(each) in _CLASSES.values():
                iter(each)
        return func(*args, **kwargs)


def can_watch(value: Any) -> bool:
    """Whether writes to a container can be told from reads."""
    return type(value) in _CLASSES


def _watched(value: Any, place: Place, path: tuple[Any, ...], log: WriteLog) -> Any:
    args = (value.default_factory, value) if type(value) is defaultdict else (value,)
    result = _CLASSES[type(value)](*args)
    result.noted, result.inner, result.set_keys = (place, path, log), {}, set()
    return result


def _note_read(container: Any) -> None:
    place, _, log = container.noted
    log.read.add(place)


def _writing(base: type, name: str) -> Callable[..., Any]:
    own = getattr(base, name)

    def write(self: Any, *given: Any, **kwargs: Any) -> Any:
        args: Any = given
        place, path, log = self.noted
        is_deferred = name in _OF_MANY and isinstance(args[0], Deferred)
        if name in _OF_MANY and not is_deferred:
            args = (list(args[0]),)  # an iterator can be read once
        elif name in ("update", "__ior__"):
            args = (dict(*args, **kwargs),)
        log.writes.append((Write(place, path, name), args))
        if any(type(each) in _CLASSES.values() for each in args):
            _note_read(self)
        if name == "setdefault":
            own(self, *args)
            return _item(base, self, args[0])
        if name == "__setitem__" and (key := _key(base, self, args[0])) is not None:
            self.inner.pop(key, None)
            self.set_keys.add(key)
        elif name == "__setitem__":
            _note_read(self)
        elif name in ("update", "__ior__"):
            for key in args[0]:
                self.inner.pop(key, None)
        result = None if is_deferred else own(self, *args)
        return self if name in ("__iadd__", "__ior__") else result

    return write


def _reading(own: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        _note_read(self)
        return own(self, *args, **kwargs)

    return read


def _item(base: Any, container: Any, key: Any) -> Any:
    value = base.__getitem__(container, key)
    place, path, log = container.noted
    key = _key(base, container, key)
    if type(value) in _CLASSES and key is not None:
        if key not in container.inner:
            container.inner[key] = _watched(value, place, (*path, key), log)
        return container.inner[key]
    if not isinstance(value, Deferred) and key not in container.set_keys:
        _note_read(container)
    return value


def _key(base: Any, container: Any, key: Any) -> Any:
    """What names an item, where indices may count from the end; None for a slice."""
    if isinstance(key, slice):
        return None
    is_index = isinstance(key, int) and not issubclass(base, dict)
    return key % max(1, base.__len__(container)) if is_index else key


def _iterated(container: Any) -> Iterator[Any]:
    """Over a list. All of its items may have been set."""
    if not container.set_keys.issuperset(range(list.__len__(container))):
        _note_read(container)
    return list.__iter__(container)


def _missing(container: Any, key: Any) -> Any:
    """As `defaultdict` does it: this is no write, since each step does it when it reads."""
    if container.default_factory is None:
        raise KeyError(key)
    value = container.default_factory()
    dict.__setitem__(container, key, value)
    return value


def _class(base: type) -> Any:
    """A subclass whose methods note what they do."""
    writes = next(_WRITES[each] for each in _WRITES if issubclass(base, each))
    members = {
        name: _writing(base, name) if name in writes else _reading(getattr(base, name))
        for name in methods_of(base)
        if callable(getattr(base, name))
    }
    members["__getitem__"] = lambda self, key: _item(base, self, key)
    if base is list:
        members["__iter__"] = _iterated
    if base is defaultdict:
        members["__missing__"] = _missing
    members[WATCHED_KIND] = base
    return type(f"Watched{base.__name__}", (base,), members)


_CLASSES = {each: _class(each) for each in (list, deque, dict, defaultdict)}
