"""All that one call of a model can read and change, before the call."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from rockmate._torch.dispatch import is_op, ops_observed
from rockmate._torch.fsdp import put_shards
from rockmate._torch.members import (
    MEMBER_TABLES,
    hooks_within,
    modules_within,
    parametrizations_afresh,
)
from rockmate._torch.storage import versions_of
from rockmate._util import attributes_set, file_of, is_users
from rockmate.errors import UnsupportedModelError
from rockmate.state.contents import Both, TensorState, items_of
from rockmate.state.iterators import is_iterator, iterators_guarded
from rockmate.state.members import Globals, objects_and_members
from rockmate.state.objects import Objects, objects_of_python
from rockmate.state.random_state import RandomState
from rockmate.state.tensors import storages_of
from rockmate.state.writes import Writes

_CachedFunction: Any = type(functools.lru_cache(len))
_LIBRARIES = {"torch", "rockmate", "builtins", "sympy"}


def outside_of(modules: Iterable[nn.Module], hooks: Iterable[Any] = ()) -> Objects:
    """What forwards may write outside of their modules: classes, and data of the files of these.

    Args:
        modules: whose forwards are meant.
        hooks: that run with them, with closures and files of their own.
    """
    members = [*dict.fromkeys(map(type, modules)), *hooks]
    roots = [*members, *contextvars.copy_context(), *map(Globals, _files_of(members))]
    own = nn.Module  # of which a frame knows the state
    return Objects(
        roots, follows=lambda kind: None if issubclass(kind, own) else objects_and_members(kind)
    )


class CallState:
    """The state that a call begins in, which can be put back.

    Attributes:
        arguments: of the call, positional ones and keywords.
        objects: modules and arguments, and what is reached from them, the classes of the modules,
            and data among the globals of the files that these stand in.
        storages: of all tensors among them.
        keeps_results: whether those that `functools.lru_cache` keeps stay when all is put back.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        classes = dict.fromkeys(map(type, modules_within(model)))
        held = [
            v for each in modules_within(model) for v in vars(each).values() if isinstance(v, type)
        ]
        files = _files_of([*classes, *held, *hooks_within(modules_within(model))])
        of_all = [each for each in hooks_within([]) if hasattr(each, "__qualname__")]
        self._model, self.arguments = model, [list(args), dict(kwargs)]
        self.keeps_results = False
        outside = [*contextvars.copy_context(), *map(Globals, files)]
        self._roots = [model, *self.arguments, *classes, *of_all, *outside]
        self.objects = self.reached()
        tensors = self.objects.tensors.values()
        self.storages = {key: each for each in tensors for key in storages_of(each)}
        self._devices = {each.device for each in tensors}
        # Of a cache that holds something no single result can be taken out.
        self._empty = [each for *_, each in _caches_of(model) if not each.cache_info().currsize]

    def has_iterators(self) -> bool:
        """Whether iterators are reached from the arguments: a run uses them up."""
        found = Objects(self.arguments, follows=objects_of_python).found.values()
        return any(is_iterator(each) for *_, content in found for each in items_of(content))

    def reached(self) -> Objects:
        """What is reached now from the same roots, with its content."""
        return Objects(self._roots, follows=objects_and_members)

    def storages_of(self, key: int) -> tuple[int, ...]:
        """The storages that a tensor had."""
        tensor = self.objects.tensors[key]
        state = self.objects.content_of(tensor)
        return storages_of(state.memory if isinstance(state, TensorState) else tensor)

    def random_now(self) -> RandomState:
        """The present random state."""
        return RandomState(self._devices)

    def versions(self) -> list[int]:
        """How often each of the tensors has been changed in place."""
        return versions_of(self.objects.tensors.values())

    def put_back(self, writes: Writes, random: RandomState | None = None) -> None:
        """Has all be as it was before the call.

        Args:
            writes: those of the call.
            random: the random state then; None leaves the present one.
        """
        put_shards(self._model)  # while hooks of fully_shard know what they have gathered
        self.objects.restore()
        for each in () if self.keeps_results else self._empty:
            each.cache_clear()
        with torch.no_grad():
            writes.restore()
        if random is not None:
            random.restore()

    @contextmanager
    def undone(self, known: Writes | None = None) -> Iterator[Writes]:
        """Puts back what a run changes; yields what at its end has the tensors among it.

        Random state is left: taking it takes memory, which would count as that of the run.

        Args:
            known: what an equal run has changed. Ops are not observed then, since a run that is
                observed may take other memory.
        """
        writes = Writes() if known is None else known.copied()
        try:
            noted = writes.noted() if known is None else nullcontext()
            with noted, iterators_guarded(self.objects), parametrizations_afresh():
                yield writes
        finally:
            self.put_back(writes)
            writes.forget_others(self.storages)

    def name_of(self, key: int) -> str:
        """Where an object stands, in words: `layers.0.weight`, an argument, a global name.

        Args:
            key: address of the object.
        """
        named = [("", self._model), *zip(("argument", "arguments"), self.arguments, strict=True)]
        named += [(_root_name(root), root) for root in self._roots[3:]]
        seen: set[int] = set()
        while named:
            path, value = named.pop(0)
            if id(value) == key:
                return path or "the model"
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, tuple):
                named += [(f"{path}[{at}]", each) for at, each in enumerate(value)]
            found = self.objects.found.get(id(value))
            if found is not None:
                named += [
                    (joined(path, step, is_named=found[1].is_named), each)
                    for step, each in steps_of(found[2])
                ]
        return "a value that the forward reaches"


def _caches_of(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """What `functools.lru_cache` wraps in a model's classes and files: owner, name, it."""
    classes = dict.fromkeys(map(type, modules_within(model)))
    bases = dict.fromkeys(base for cls in classes for base in cls.__mro__)
    return [
        (owner, name, value)
        for owner in (*_files_of(classes), *bases)
        for name, value in vars(owner).items()
        if isinstance(value, _CachedFunction)
    ]


def _without_draws(function: Any) -> Any:
    def observe(op: Any, args: Any, kwargs: Any) -> Any:
        if is_op(op) and torch.Tag.nondeterministic_seeded in op.tags:
            raise UnsupportedModelError(
                f"{function.__qualname__} draws random numbers that functools.lru_cache keeps, "
                "and a plan would draw them in each step. Draw them before the forward."
            )
        return op(*args, **kwargs)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ops_observed(observe):
            return function(*args, **kwargs)

    return run


def _is_of_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def empty_caches() -> list[Any]:
    """What `functools.lru_cache` wraps, wherever it stands, that holds no result.

    One that holds results, which a script may go on with, keeps all. Takes a look at every object.
    """
    cached = [each for each in gc.get_objects() if type(each) is _CachedFunction]
    known = [each for each in cached if not _is_of_library(each.__module__)]
    return [each for each in known if not each.cache_info().currsize]


def caches_passed_by(model: nn.Module) -> AbstractContextManager[None]:
    """Has a model's classes and their files call what `functools.lru_cache` wraps, uncached.

    A cache would keep tensors of a trace for the calls that follow, and give the trace others.

    Raises:
        UnsupportedModelError: within, for one that draws: a plan would draw in each step.
    """
    cached = _caches_of(model)
    uncached = ((owner, name, _without_draws(each.__wrapped__)) for owner, name, each in cached)
    return attributes_set(*uncached)


def lengths_as_sizes(model: nn.Module) -> AbstractContextManager[None]:
    """Has a model's files take a tensor's first size, which may be a symbol, for its length.

    Python makes a number of what `len` gives.
    """
    files = _files_of(map(type, modules_within(model)))
    return attributes_set(*((each, "len", _length) for each in files if "len" not in vars(each)))


def _length(value: Any) -> Any:
    is_sized = isinstance(value, torch.Tensor) and value.dim() > 0
    return value.shape[0] if is_sized else len(value)


def undone(model: nn.Module, known: Writes | None = None) -> AbstractContextManager[Writes]:
    """Puts all back that a run of a model changes; see `CallState.undone`."""
    return CallState(model, (), {}).undone(known)


def steps_of(content: Any) -> list[tuple[Any, Any]]:
    """What a content leads to, each with its key."""
    if isinstance(content, dict):
        return list(content.items())
    if isinstance(content, list):
        return list(enumerate(content))
    items = steps_of(content.items) if isinstance(content, Both) else []
    attributes = getattr(content, "attributes", None)
    return [*items, *attributes.items()] if isinstance(attributes, dict) else []


def joined(path: str, step: Any, *, is_named: bool) -> str:
    """The path one step further."""
    if not is_named and not _is_table(path):
        return f"{path}[{step!r}]"
    if _is_table(path):
        path = path.rpartition(".")[0]
    return f"{path}.{step}" if path else str(step)


def _is_table(path: str) -> bool:
    return path.rpartition(".")[2] in MEMBER_TABLES


def _root_name(root: Any) -> str:
    if isinstance(root, Globals):
        return root.__name__
    if isinstance(root, contextvars.ContextVar):
        return f"context variable {root.name}"
    return f"class {root.__qualname__}" if isinstance(root, type) else root.__qualname__


def _files_of(members: Iterable[Any]) -> list[types.ModuleType]:
    """Those that classes and functions stand in, but for libraries.

    The user's own files that such files name, and so on, are among them.
    """
    names = dict.fromkeys(str(getattr(each, "__module__", "")) for each in members)
    pending = [each for each in names if not _is_of_library(each)]
    files = []
    for name in pending:
        file = sys.modules.get(name)
        if file is None:
            continue
        files.append(file)
        if not is_users(file_of(file)):
            continue
        for value in [*vars(file).values()]:
            own = _module_of(value)
            if own not in names and is_users(file_of(sys.modules.get(own))):
                names[own] = None
                pending.append(own)
    return files


def _module_of(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    return str(value.__module__) if isinstance(value, types.FunctionType | type) else ""
