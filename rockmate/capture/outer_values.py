"""Values that forwards, hooks and autograd functions read outside: globals, closures, members.

A trace takes them as they are, trials are few, and a trial runs no backward. Only the user's code
is looked at: it is found by the names that it mentions, and so are the functions that it calls.
Installed libraries are taken for constant.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from rockmate._torch.members import hooks_within
from rockmate._util import file_of, is_users
from rockmate.capture.attribute_access import Place
from rockmate.capture.attribute_values import is_mutable

_METHODS = ("forward", "setup_context", "backward", "vjp")


def values_read_by(model: nn.Module, functions: Iterable[type]) -> list[Place]:
    """Where the values stand that forwards, hooks and autograd functions read from outside.

    Args:
        model: whose forwards and hooks, and those of its submodules, are meant.
        functions: classes of autograd functions.
    """
    reader = _Reader()
    for cls in functions:
        for name in _METHODS:
            reader.follow(getattr(cls, name), cls)
    for module in model.modules():
        own = vars(module).get("forward")
        reader.follow(own or getattr(type(module), "forward", None), type(module))
        for value in vars(module).values():  # an activation function, say
            reader.follow(value)
    for hook in hooks_within(model.modules()):
        reader.follow(hook)
    methods = [Place(each, name) for each in model.modules() for name in reader.methods[type(each)]]
    return [*reader.found(), *methods]


def objects_of_hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """What the hooks of modules read from outside, and the objects whose methods they are."""
    reader, hooks = _Reader(), hooks_within(modules)
    for hook in hooks:
        reader.follow(hook)
    owners = [hook.__self__ for hook in hooks if hasattr(hook, "__self__")]
    return [*owners, *(place.value() for place in reader.found())]


class _Reader:
    """Follows the names that code mentions.

    Attributes:
        methods: of a class, those that it follows beside forwards, which a script may replace.
    """

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}
        self._seen: set[tuple[int, type | None]] = set()
        self._members: dict[int, set[str]] = {}
        self._names, self._objects = set[str](), dict[int, Any]()
        self.methods = defaultdict[type, set[str]](set)

    def found(self) -> list[Place]:
        """The places, with those of attributes: an object may be handed on before it is read."""
        num_known = -1
        while num_known != (num_known := len(self._names) + len(self._objects)):
            for value in [*self._objects.values()]:
                self._objects |= self._within(value)
                for name in self._names & {*dir(type(value))}:
                    member = inspect.getattr_static(type(value), name)
                    self.follow(member, type(value))
                    if isinstance(member, FunctionType) and is_users(file_of(type(value))):
                        self.methods[type(value)].add(name)
        for value in self._objects.values():
            for name in self._names & {*vars(value), *self.methods[type(value)]}:
                self._places.setdefault(Place(value, name))
        return list(self._places)

    def _within(self, owner: Any) -> dict[int, Any]:
        """Objects of the user's classes in attributes of one, as a config in a config."""
        held = [vars(owner)[name] for name in self._names & vars(owner).keys()]
        kinds = nn.Module, torch.Tensor, type, ModuleType, FunctionType
        return {
            id(each): each
            for each in held
            if hasattr(each, "__dict__")
            and not isinstance(each, kinds)
            and (isinstance(each, SimpleNamespace) or is_users(file_of(type(each))))
        }

    def follow(self, function: Any, owner: type | None = None) -> None:
        """Takes what a function of the user's mentions, a method with others of its class.

        So it does of an object that is called like one, and of what a partial function calls.
        """
        if isinstance(function, partial):
            function = function.func
        if callable(function) and is_users(file_of(type(function))):
            function, owner = type(function).__call__, type(function)
        function = getattr(function, "fget", None) or getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or (id(function), owner) in self._seen:
            return
        self._seen.add((id(function), owner))
        if not is_users(function.__code__.co_filename):
            return
        names, global_names = _names_of(function.__code__)
        self._names |= names
        module = sys.modules.get(function.__module__)
        for name in global_names & function.__globals__.keys() if module is not None else ():
            self._take(Place(module, name), names)
        for cell in function.__closure__ or ():
            self._take(Place(cell, "cell_contents"), names)
        if owner is None:
            return
        for name in names:
            member = getattr(owner, name, None)
            self.follow(member, owner)
            if _is_data_of(owner, name):  # type(self).name, which is read of no object
                self._take(Place(owner, name), names)
            if name != "forward" and isinstance(member, FunctionType):
                self.methods[owner].add(name)

    def _take(self, place: Place, names: set[str]) -> None:
        """Takes the value at a place, or what is read of it."""
        value = place.value()
        if isinstance(value, FunctionType):
            self.follow(value)
            if is_users(value.__code__.co_filename):  # a script may put another one there
                self._places.setdefault(place)
        elif isinstance(value, ModuleType | type):
            if is_users(file_of(value)):
                known = self._members.setdefault(id(value), set())  # modules name one another
                fresh = names & vars(value).keys() - known
                known |= fresh
                for name in fresh:
                    self._take(Place(value, name), names)
        elif not callable(value) or is_users(file_of(type(value))):
            self._places.setdefault(place)
            if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
                self._objects[id(value)] = value


def _is_data_of(owner: type, name: str) -> bool:
    """Whether a name stands for a fixed value in a class of the user's, or in one beneath it.

    Tables of a class are read, and filled, as attributes of its objects.
    """
    classes = [each for each in owner.__mro__ if name in vars(each)]
    if not classes or name.startswith("__") or not is_users(file_of(classes[0])):
        return False
    value = vars(classes[0])[name]
    return not (hasattr(value, "__get__") or is_mutable(value))


@cache
def _names_of(code: CodeType) -> tuple[set[str], set[str]]:
    """All names that code mentions, and those of global values among them."""
    names = set(code.co_names)
    global_names = {each.argval for each in dis.get_instructions(code) if "GLOBAL" in each.opname}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, inner_global = _names_of(constant)
            names, global_names = names | inner, global_names | inner_global
    return names, global_names
