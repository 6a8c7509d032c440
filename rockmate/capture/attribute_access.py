"""Records which attributes a forward reads and assigns, and puts all of them back.

A trace runs the model's Python once for each pass. A plan does not run it at all. So it has to be
known which attributes the result depends on, and which ones the forward leaves behind.

Attributes are those of the model's modules, and of the objects that the forward reaches through
them: a config, a dataclass, an item of a list. Parameters, buffers, submodules and hooks are left
to the signature of the model. The classes of all of them get an `__getattribute__` and a
`__setattr__` that record, for the duration of one run. Python has no other way to see a read.
`nn.Module` itself is left, since what it has is looked up anew in each class of modules there is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch
from torch import nn

from rockmate._torch.members import RECURRENT_WEIGHTS, is_member, tensor_tables
from rockmate._util import attributes_set, file_of, is_users
from rockmate.capture.attribute_values import is_container, items_of, snapshot
from rockmate.errors import UnsupportedModelError
from rockmate.state.members import objects_and_members
from rockmate.state.objects import ABSENT, OF_ATTRIBUTES, Handler, Objects

# What every module has: its tables of members and hooks, and its mode.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Says in a Hugging Face model that it has its hooks; those stay, so this stays.
_HOOKS_INSTALLED = "_output_capturing_hooks_installed"
_UNRECORDED = _OF_EVERY_MODULE | RECURRENT_WEIGHTS | {_HOOKS_INSTALLED}
_HOOKS = ("__getattribute__", "__setattr__", "__delattr__")
_C_METHOD = types.WrapperDescriptorType
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # of `__flags__`; there are no public names for them


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """An attribute of an object; one of the same object and name is equal.

    Attributes:
        owner: the object.
        name: of the attribute.
    """

    owner: Any
    name: str

    def __eq__(self, other: object) -> bool:
        is_place = isinstance(other, Place)
        return is_place and self.owner is other.owner and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))

    def __str__(self) -> str:
        if hasattr(self.owner, "__name__"):  # a class, or a file
            return f"{self.name} of {self.owner.__name__}"
        return f"{self.name} of a {type(self.owner).__name__}"

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer of a module."""
        return isinstance(self.owner, nn.Module) and self.name in tensor_tables(self.owner)[1]

    def value(self) -> Any:
        """What stands there now; `ABSENT` if nothing does."""
        if self.is_buffer:
            return tensor_tables(self.owner)[1][self.name]
        if isinstance(self.owner, nn.Module):  # whose `__getattr__` takes long to fail
            found = vars(self.owner).get(self.name, ABSENT)
            return getattr(type(self.owner), self.name, ABSENT) if found is ABSENT else found
        value = getattr(self.owner, self.name, ABSENT)
        return value.__func__ if getattr(value, "__self__", None) is self.owner else value

    def put(self, value: Any) -> None:
        """Has `value` stand there."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif self.is_buffer:
            tensor_tables(self.owner)[1][self.name] = value
        elif isinstance(self.owner, type):
            setattr(self.owner, self.name, value)
        elif value is ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = value

    def of_copy(self, memo: dict[int, Any]) -> Place:
        """The place in a copy of the owner, which `copy.deepcopy` has made."""
        return Place(memo.get(id(self.owner), self.owner), self.name)


@dataclass(slots=True)
class Accesses:
    """What one run of the forward has read and assigned.

    Attributes:
        reads: attributes that were read before they were assigned, if ever.
        assigned: attributes that were assigned before they were read, if ever.
        listed: objects whose `__dict__` was read, by address: any of its values may have been.
        owners: the objects whose attributes are recorded, by address.
    """

    reads: dict[Place, None] = field(default_factory=dict)  # in their order
    assigned: dict[Place, None] = field(default_factory=dict)
    listed: dict[int, Any] = field(default_factory=dict)
    owners: dict[int, Any] = field(default_factory=dict)

    def note(self, owner: Any, name: str, *, is_read: bool) -> bool:
        """Adds an access of an attribute, unless it was assigned; whether it was not."""
        place = Place(owner, name)
        if place in self.assigned:
            return False
        if is_read or place not in self.reads:
            (self.reads if is_read else self.assigned)[place] = None
        return True

    def add_reads(self, others: Accesses) -> None:
        """Adds what others have read, unless it was assigned."""
        others.add_listed(())
        self.reads |= {place: None for place in others.reads if place not in self.assigned}

    def add_listed(self, left: Container[Place]) -> None:
        """Adds reads of what objects hold whose `__dict__` was read, but for what is `left` there.

        Those are tensors of the run.
        """
        for owner in self.listed.values():
            places = (Place(owner, name) for name in _attributes_of(owner))
            found = (each for each in places if not (each in left or each in self.assigned))
            self.reads |= dict.fromkeys(found)


class AttributeState:
    """The attributes and submodules of a model before its forward runs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._submodules = set(map(id, model.modules()))
        self._saved: dict[int, tuple[Any, dict[str, Any]]] = {}  # owner, and snapshots
        for module in model.modules():
            self.save(module)
        self._objects = Objects([model], follows=_objects_in_trace)

    def save(self, owner: Any) -> None:
        """Adds an object that the forward has reached."""
        if id(owner) not in self._saved and hasattr(owner, "__dict__"):
            now = {name: snapshot(value) for name, value in _attributes_of(owner).items()}
            self._saved[id(owner)] = owner, now

    def changes(self) -> list[tuple[Place, Any]]:
        """The attributes that differ now, with their values; `ABSENT` for one that is gone."""
        found = []
        for owner, before in self._saved.values():
            now = _attributes_of(owner)
            for name in before.keys() | now.keys():
                if name not in now or snapshot(now[name]) != before.get(name):
                    found.append((Place(owner, name), now.get(name, ABSENT)))
        return found

    def refuse_changes(self, outside: Objects) -> None:
        """Raises if a backward has changed an attribute, or what is `outside` of the model.

        What a forward changes in attributes is put back before.
        """
        kinds = {place: type(place.owner) for place, _ in self.changes()}
        changed: list[Any] = [  # not an op, say, which notes its name when it is asked for it
            place
            for place, kind in kinds.items()
            if issubclass(kind, nn.Module) or is_users(file_of(kind))
        ]
        for place in changed or starmap(Place, outside.changed()):
            self.restore()
            raise UnsupportedModelError(
                f"the model's backward changes {place}, in a hook or an autograd function, and a "
                "planned backward runs no Python. Change it behind the backward, or keep the "
                'budget without a plan: mode="frames".'
            )

    def replaced_module(self) -> str:
        """Path of a submodule that is not the one that it was; empty if there is none."""
        present = self._model.named_modules()
        return next((path for path, each in present if id(each) not in self._submodules), "")

    def restore(self) -> None:
        """Puts all attributes and submodules back."""
        self._objects.restore()


def _objects_in_trace(kind: type) -> Handler | None:
    """The handler of a type, but of what a trace has its own ones of."""
    if issubclass(kind, torch.Tensor):
        return OF_ATTRIBUTES
    return None if issubclass(kind, torch.Generator) else objects_and_members(kind)


def outside_in_trace(kind: type) -> Handler | None:
    """The handler of a type outside of the model, whose members are others in a trace."""
    return None if issubclass(kind, nn.Module) else _objects_in_trace(kind)


@contextlib.contextmanager
def accesses_recorded(model: nn.Module, state: AttributeState) -> Iterator[Accesses]:
    """Records what the forward of `model` reads and assigns in this thread.

    Args:
        model: the model.
        state: gets the objects that the forward reaches, before it can change them.
    """
    accesses = Accesses(owners={id(module): module for module in model.modules()})
    with contextlib.ExitStack() as stack:
        recorder = _Recorder(accesses, state, stack)
        for cls in dict.fromkeys(map(type, model.modules())):
            recorder.record(cls)
        yield accesses


class _Recorder:
    """Puts methods that record into classes, until a stack is closed."""

    def __init__(
        self, accesses: Accesses, state: AttributeState, stack: contextlib.ExitStack
    ) -> None:
        self._accesses, self._state, self._stack = accesses, state, stack
        self._recorded = set[type]()
        self._thread = threading.get_ident()
        self._is_resting = False
        self._containers: dict[int, Any] = {}  # whose items have been reached, by address

    def record(self, cls: type) -> None:
        """Has accesses to instances of a class recorded."""
        if cls in self._recorded or issubclass(cls, torch.jit.ScriptModule):
            return
        self._recorded.add(cls)
        read, assign, delete = (getattr(cls, name) for name in _HOOKS)

        def get_attribute(owner: Any, name: str) -> Any:
            try:
                value = read(owner, name)
            except AttributeError:
                self._note_read(owner, name, ABSENT)
                raise
            self._note_read(owner, name, value)
            return value

        def set_attribute(owner: Any, name: str, value: Any) -> None:
            self._note_assigned(owner, name)
            assign(owner, name, value)

        def delete_attribute(owner: Any, name: str) -> None:
            self._note_assigned(owner, name)
            delete(owner, name)

        hooks = zip(_HOOKS, (get_attribute, set_attribute, delete_attribute), strict=True)
        self._stack.enter_context(attributes_set(*((cls, *each) for each in hooks)))

    def _note_read(self, owner: Any, name: str, value: Any) -> None:
        is_all = name == "__dict__" and is_users(sys._getframe(2).f_code.co_filename)
        for each, item in [*value.items()] if is_all else ((name, value),):
            if self._is_unrecorded(owner, each):
                continue
            self._is_resting = True  # what is looked up here is no read of the forward
            try:
                if is_all:
                    self._accesses.listed[id(owner)] = owner
                    self._reach(item)
                elif not _is_of_class(owner, each) and self._accesses.note(
                    owner, each, is_read=True
                ):
                    self._reach(item)
            finally:
                self._is_resting = False

    def _note_assigned(self, owner: Any, name: str) -> None:
        if not self._is_unrecorded(owner, name):
            self._accesses.note(owner, name, is_read=False)

    def _is_unrecorded(self, owner: Any, name: str) -> bool:
        return (
            self._is_resting
            or name.startswith("__")
            or id(owner) not in self._accesses.owners
            or threading.get_ident() != self._thread
            or (isinstance(owner, nn.Module) and name in _UNRECORDED)
        )

    def _reach(self, value: Any) -> None:
        """Has the attributes of an object recorded that the forward has read, and of its items."""
        if isinstance(value, functools.partial):
            value = (value.func, *value.args)
        value = getattr(value, "__self__", value) if callable(value) else value  # of a method
        if id(value) in self._accesses.owners:
            return
        if is_container(value) or isinstance(value, tuple):
            if id(value) not in self._containers:
                self._containers[id(value)] = value
                for item in items_of(value):
                    self._reach(item)
        elif isinstance(value, nn.Module) or _can_record(type(value)):
            self._accesses.owners[id(value)] = value
            self._state.save(value)
            self.record(type(value))


def _attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of an object, less those that every module has."""
    if isinstance(owner, torch.jit.ScriptModule):  # its own are fixed, but for a cache of methods
        return {}
    if not isinstance(owner, nn.Module):
        return dict(vars(owner))
    return {name: value for name, value in vars(owner).items() if name not in _UNRECORDED}


def _is_of_class(owner: Any, name: str) -> bool:
    """Whether a name stands for a member of a module, or a method or property of a class.

    What a property reads is recorded by itself. Methods of the user's classes are values, since a
    script may put others there; those of modules are found without a run (`outer_values`).
    """
    if isinstance(owner, nn.Module) and is_member(owner, name):
        return True
    if name in getattr(owner, "__dict__", ()):
        return False
    if isinstance(owner, nn.Module) and name in vars(nn.Module):
        return True
    found = inspect.getattr_static(type(owner), name, ABSENT)
    if isinstance(found, types.FunctionType) and not isinstance(owner, nn.Module):
        return not is_users(found.__code__.co_filename)
    return hasattr(found, "__get__") and not isinstance(found, types.MemberDescriptorType)


def _can_record(cls: type) -> bool:
    """Whether the methods of a class can be replaced, and its instances have attributes.

    Numbers and strings are values, and nothing depends on a logger. The classes of C++ objects,
    such as the schema of an op, have a metaclass that sets their attributes in its own way.
    """
    metaclasses = [each for each in inspect.getmro(type(cls)) if each not in (type, object)]
    if any(isinstance(vars(each).get("__setattr__"), _C_METHOD) for each in metaclasses):
        return False
    if issubclass(cls, type | torch.Tensor | types.ModuleType | logging.Logger | int | float | str):
        return False
    return bool(cls.__flags__ & _HEAP_TYPE) and not cls.__flags__ & _IMMUTABLE_TYPE
