"""Values that the code of a forward reads from outside of its module: globals and closures.

A capture has them as they were. Only code of the user's is looked at: it is found by the names that
it mentions, and so are the functions that it calls. Installed libraries are taken for constant.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate._torch.storage import version_of
from rockmate.frames.replaced_forward import forwards_of

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_MOST_ELEMENTS = 64
"""Of a container that is compared one by one; of others only the number counts."""
_ROOT = str(Path(__file__).parents[1])


class _Place(NamedTuple):
    """Where a value is found."""

    holder: Any
    name: str

    def value(self) -> Any:
        """What is there now."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.name)
        return getattr(self.holder, self.name, None)


class OuterValues:
    """What the forwards of a module and of its submodules read from outside."""

    def __init__(self, module: nn.Module) -> None:
        """Finds the places by the code as it is."""
        self._places: dict[tuple[int, str], _Place] = {}
        self._seen: set[int] = set()
        for each, forward in zip(module.modules(), forwards_of(module), strict=True):
            self._follow(getattr(forward, "__func__", forward), type(each))
            for attribute in vars(each).values():  # an activation function, say
                self._follow(attribute)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._places)

    def now(self) -> tuple[Any, ...]:
        """The present values, to compare with those of another time."""
        return tuple([_snapshot(place.value()) for place in self._places.values()])

    def _follow(self, function: Any, owner: type | None = None) -> None:
        if not isinstance(function, FunctionType) or id(function) in self._seen:
            return
        self._seen.add(id(function))
        if not _is_users(function.__code__.co_filename):
            return
        names = set(_names_of(function.__code__))
        for name in names & function.__globals__.keys():
            self._take(_Place(function.__globals__, name), names)
        for cell in function.__closure__ or ():
            self._take(_Place(cell, "cell_contents"), names)
        for name in names if owner is not None else ():
            self._follow(getattr(owner, name, None), owner)

    def _take(self, place: _Place, names: set[str]) -> None:
        """Takes the value at a place, or what is read of it."""
        value = place.value()
        if isinstance(value, MethodType):
            self._follow(value.__func__, type(value.__self__))
            value = value.__self__
        if isinstance(value, FunctionType):
            self._follow(value)
        elif isinstance(value, ModuleType | type):
            if _is_users(_file_of(value)):
                for name in names & vars(value).keys():
                    self._take(_Place(value, name), names)
        elif not callable(value) or _is_users(_file_of(type(value))):
            self._places.setdefault((id(place.holder), place.name), place)


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


def _file_of(value: Any) -> str:
    if isinstance(value, type):
        value = sys.modules.get(value.__module__)
    return str(getattr(value, "__file__", None) or _ROOT)


@cache
def _is_users(file: str) -> bool:
    """Whether code is neither of an installed package, nor of Python's library, nor of this one."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(file.startswith((place, "<frozen")) for place in (*places, _ROOT))


def _snapshot(value: Any) -> Any:
    """Equal for equal values of atoms, and for the same others."""
    if isinstance(value, dict):
        return len(value), *(_flat(each) for each in list(value.items())[:_MOST_ELEMENTS])
    if isinstance(value, list | tuple | set | frozenset):
        return len(value), *map(_flat, list(value)[:_MOST_ELEMENTS])
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        return _flat(value)
    return id(value), *((name, _flat(each)) for name, each in vars(value).items())


def _flat(value: Any) -> Any:
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, tuple):
        return tuple(map(_flat, value))
    return id(value), len(value) if isinstance(value, list | dict | set) else 0
