"""State of modules, tensors, functions, classes and global names, as of other objects."""

from __future__ import annotations

import contextvars
import functools
import random
import threading
import types
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from rockmate._torch.members import RECURRENT_WEIGHTS, all_hooks_of
from rockmate.state.contents import ATOMS, Both, TensorState, has_same_memory
from rockmate.state.objects import (
    ABSENT,
    LIBRARIES,
    OF_ATTRIBUTES,
    Handler,
    is_buffer,
    keep,
    objects_of_python,
    put_dict,
)


@cache
def objects_and_members(kind: type) -> Handler | None:
    """The handler of a type, of modules, tensors, functions and classes of users too."""
    if kind in _OF_KINDS:
        return _OF_KINDS[kind]
    found = (handler for base, handler in _OF_SUBCLASSES if issubclass(kind, base))
    return next(found, None) or objects_of_python(kind)


# --- modules --------------------------------------------------------------------------------------


def _module_state(module: nn.Module) -> dict[str, Any]:
    own = OF_ATTRIBUTES.take(module)
    if not RECURRENT_WEIGHTS.isdisjoint(own):
        own = {name: each for name, each in own.items() if name not in RECURRENT_WEIGHTS}
    return own | {"__class__": type(module)}  # which parametrizations replace


def _put_module(module: nn.Module, content: dict[str, Any]) -> None:
    content = dict(content)
    kind = content.pop("__class__")
    if type(module) is not kind:
        module.__class__ = kind
    renewed = {name: each for name, each in vars(module).items() if name in RECURRENT_WEIGHTS}
    OF_ATTRIBUTES.put(module, content | renewed)


# --- tensors and functions ------------------------------------------------------------------------


def _tensor_state(tensor: torch.Tensor) -> TensorState:
    hooks: Any = tuple([None if each is None else dict(each) for each in all_hooks_of(tensor)])
    gradient = tensor.grad if tensor.is_leaf else None
    return TensorState(tensor.detach(), tensor.requires_grad, gradient, hooks, dict(vars(tensor)))


def _put_tensor(tensor: torch.Tensor, before: TensorState) -> None:
    if not has_same_memory(tensor, before.memory):
        tensor.data = before.memory
    if tensor.is_leaf:
        if tensor.requires_grad != before.requires_grad:
            tensor.requires_grad_(before.requires_grad)
        if tensor.grad is not before.gradient:
            tensor.grad = before.gradient
    for table, held in zip(all_hooks_of(tensor), before.hooks, strict=True):
        if table is not None:
            put_dict(table, held or {})
    put_dict(vars(tensor), before.attributes)


def _held_by(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return ABSENT


def _state_of(function: types.FunctionType) -> Both:
    found = [*map(_held_by, function.__closure__ or ()), *(function.__defaults__ or ())]
    return Both(found, dict(vars(function)))


def _put_function(function: types.FunctionType, content: Both) -> None:
    put_dict(vars(function), content.attributes)
    for cell, value in zip(function.__closure__ or (), content.items, strict=False):
        if value is not ABSENT and _held_by(cell) is not value:
            cell.cell_contents = value


# --- classes and globals --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Globals:
    """The global names of a file of Python, as a root.

    Attributes:
        file: the module.
    """

    file: types.ModuleType

    @property
    def __name__(self) -> str:
        """Name of the module."""
        return str(getattr(self.file, "__name__", "a file"))


_METHODS = (staticmethod, classmethod)  # an autograd function has no others


def _is_of(value: Any, file: str) -> bool:
    """Whether a function or class, or that of an object, stands in a file of the user's."""
    found = value if isinstance(value, (types.FunctionType, type, *_METHODS)) else type(value)
    return found.__module__ == file


def _data_of_class(cls: type) -> dict[str, Any]:
    if cls.__module__.partition(".")[0] in LIBRARIES:
        return {}
    return {
        name: each
        for name, each in vars(cls).items()
        if not (name.startswith("__") or isinstance(each, types.ModuleType))
        and (_is_of(each, cls.__module__) or not (hasattr(type(each), "__get__") or callable(each)))
    }


_GLOBAL_KINDS = (
    *ATOMS, dict, list, set, deque, torch.Tensor, torch.Generator, random.Random,
    np.random.Generator, contextvars.ContextVar, threading.local,
)  # fmt: skip


def _data_of_globals(found: Globals) -> dict[str, Any]:
    file = found.__name__
    return {
        name: value
        for name, value in vars(found.file).items()
        if not name.startswith("__")
        and not isinstance(value, nn.Module)
        and (
            isinstance(value, _GLOBAL_KINDS)
            or hasattr(type(value), "__next__")
            or _is_of(value, file)
            or is_buffer(value)
        )
    }


def _put_names(found: type | Globals, content: dict[str, Any]) -> None:
    """Gives a class or a file its data back, past what a metaclass does."""
    now = _data_of_class(found) if isinstance(found, type) else _data_of_globals(found)
    owner: Any = found if isinstance(found, type) else found.file
    kind: Any = type if isinstance(found, type) else object
    for name in now.keys() - content.keys():
        kind.__delattr__(owner, name)
    for name, value in content.items():
        if now.get(name, ABSENT) is not value:
            kind.__setattr__(owner, name, value)


_OF_KINDS: dict[type, Handler] = {
    **dict.fromkeys((torch.Tensor, nn.Parameter), Handler(_tensor_state, _put_tensor)),
    **dict.fromkeys(_METHODS, Handler(lambda method: [method.__func__], keep)),
    types.FunctionType: Handler(_state_of, _put_function),
    types.MethodType: Handler(lambda method: [method.__self__], keep),
    functools.partial: Handler(
        lambda value: [value.func, *value.args, *value.keywords.values()], keep
    ),
    Globals: Handler(_data_of_globals, _put_names, is_named=True),
}
_OF_SUBCLASSES: tuple[tuple[type, Handler], ...] = (
    # What else TorchScript has is fixed, and its tables are no containers of Python.
    (
        torch.jit.ScriptModule,
        Handler(lambda script: [*script.parameters(), *script.buffers()], keep),
    ),
    (nn.Module, Handler(_module_state, _put_module, is_named=True)),
    (torch.Tensor, OF_ATTRIBUTES),  # a quantized weight, say
    (type, Handler(_data_of_class, _put_names, is_named=True)),
)
