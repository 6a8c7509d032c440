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
    if issubclass(kind, torch.jit.ScriptModule):
        return _OF_SCRIPT
    if issubclass(kind, nn.Module):
        return _OF_MODULE
    if kind in (torch.Tensor, nn.Parameter):
        return _OF_TENSOR
    if issubclass(kind, torch.Tensor):  # a quantized weight, say
        return OF_ATTRIBUTES
    if kind is types.FunctionType:
        return _OF_FUNCTION
    if kind is types.MethodType:
        return _OF_METHOD
    if kind in _METHODS:
        return _OF_STATIC_METHOD
    if kind is functools.partial:
        return _OF_PARTIAL
    if issubclass(kind, type):
        return _OF_CLASS
    return _OF_GLOBALS if kind is Globals else objects_of_python(kind)


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


_OF_MODULE = Handler(_module_state, _put_module, is_named=True)
# What else TorchScript has is fixed, and its tables are no containers of Python.
_OF_SCRIPT = Handler(lambda script: [*script.parameters(), *script.buffers()], keep)


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


def _state_of(function: types.FunctionType) -> Both:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not bound yet
            found.append(ABSENT)
    return Both([*found, *(function.__defaults__ or ())], dict(vars(function)))


def _put_function(function: types.FunctionType, content: Both) -> None:
    put_dict(vars(function), content.attributes)
    for cell, value in zip(function.__closure__ or (), content.items, strict=False):
        try:
            is_same = cell.cell_contents is value
        except ValueError:
            is_same = value is ABSENT
        if not is_same and value is not ABSENT:
            cell.cell_contents = value


_OF_TENSOR = Handler(_tensor_state, _put_tensor)
_OF_FUNCTION = Handler(_state_of, _put_function)
_OF_METHOD = Handler(lambda method: [method.__self__], keep)
_METHODS = (staticmethod, classmethod)  # an autograd function has no others
_OF_STATIC_METHOD = Handler(lambda method: [method.__func__], keep)
_OF_PARTIAL = Handler(lambda value: [value.func, *value.args, *value.keywords.values()], keep)


# --- classes and globals --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Globals:
    """The global names of a file of Python, as a root.

    Attributes:
        table: of them.
    """

    table: dict[str, Any]

    @property
    def __name__(self) -> str:
        """Name of the file's module."""
        return str(self.table.get("__name__", "a file"))


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


def _put_class(cls: type, content: dict[str, Any]) -> None:
    now = _data_of_class(cls)
    for name in now.keys() - content.keys():
        type.__delattr__(cls, name)
    for name, value in content.items():
        if now.get(name, ABSENT) is not value:
            type.__setattr__(cls, name, value)


_GLOBAL_KINDS = (
    *ATOMS, dict, list, set, deque, torch.Tensor, torch.Generator, random.Random,
    np.random.Generator, contextvars.ContextVar, threading.local,
)  # fmt: skip


def _data_of_globals(found: Globals) -> dict[str, Any]:
    file = found.__name__
    return {
        name: value
        for name, value in found.table.items()
        if not name.startswith("__")
        and not isinstance(value, nn.Module)
        and (
            isinstance(value, _GLOBAL_KINDS)
            or hasattr(type(value), "__next__")
            or _is_of(value, file)
            or is_buffer(value)
        )
    }


def _put_globals(found: Globals, content: dict[str, Any]) -> None:
    for name in _data_of_globals(found).keys() - content.keys():
        del found.table[name]
    for name, value in content.items():
        if found.table.get(name, ABSENT) is not value:
            found.table[name] = value


_OF_CLASS = Handler(_data_of_class, _put_class, is_named=True)
_OF_GLOBALS = Handler(_data_of_globals, _put_globals, is_named=True)
