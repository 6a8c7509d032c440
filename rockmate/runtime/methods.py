"""Methods of a model beside its forward: planned as the forward of a twin, or warned of."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import reprlib
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from rockmate.errors import InvalidArgumentError
from rockmate.runtime.pending_steps import pending_steps_of, share_pending_steps
from rockmate.state.tensors import tensors_in

logger = logging.getLogger(__name__)

_ABOVE = (
    "Write @rockmate.plan_step(modules=[...], budget=...) above %s, without a batch_idx, with the "
    "names of the submodules that it calls; or wrap these in place of the LightningModule."
)
_IN_PLACE = "Write rockmate.plan_in_place(model, budget=...), which plans the calls within it."


def is_of_lightning(owner: object) -> bool:
    """Whether it is a LightningModule, whose methods call `self.log` of a trainer."""
    return any(each.__name__ == "LightningModule" for each in owner.__class__.__mro__)


def names_of_methods(model: nn.Module, names: Collection[str], *, has_plan: bool) -> list[str]:
    """The methods to plan beside `forward`, each once; `has_plan` where a plan was given.

    Raises:
        InvalidArgumentError: a plan was given, which is one of `forward`; the names are not in a
            list; or the model has no such method, or it is one of every module or of Lightning's.
    """
    if isinstance(names, str):
        msg = f"methods is {names!r}; give a list of names, methods=[{names!r}]."
        raise InvalidArgumentError(msg)
    found = [name for name in dict.fromkeys(names) if name != "forward"]
    if found and has_plan:
        msg = "a given plan is one of forward: leave methods out, or give a budget."
        raise InvalidArgumentError(msg)
    own = [name for name in dir(type(model)) if not name.startswith("__")]
    own = [name for name in own if not hasattr(nn.Module, name)]
    known = [name for name in own if callable(inspect.getattr_static(type(model), name))]
    for name in found:
        method = getattr(model, str(name), None)
        if isinstance(method, nn.Module):
            msg = (
                f"methods names {name!r}, a submodule of the {type(model).__name__}. Wrap it by "
                f"itself: model.{name} = RockmateModule(model.{name}, ...)."
            )
            raise InvalidArgumentError(msg)
        if not callable(method) or hasattr(nn.Module, name):
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            msg = (
                f"methods names {reprlib.repr(name)}, and the {type(model).__name__} has no such "
                f"method to train by.{hint}"
            )
            raise InvalidArgumentError(msg)
        if is_of_lightning(model):
            msg = f"methods names {name!r}, and what a LightningModule logs is no part of a plan."
            raise InvalidArgumentError(f"{msg} {_ABOVE % name}")
    return found


def twin_of(model: nn.Module, method: str = "") -> nn.Module:
    """The same model, of which a call is one of a method.

    Both have one dictionary of attributes, so their parameters, modes and all else are the same at
    all times. Hooks of the model do not run around the method, as in eager. What the method calls
    by `self(...)` is the model's forward.

    Args:
        model: the model.
        method: its name; "" takes it from the first argument of each call.
    """
    cls, is_within = type(model), False

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_within
        if is_within:
            return cls.__call__(self, *args, **kwargs)
        name, rest = (method, args) if method else (args[0], args[1:])
        is_within = True
        try:
            return getattr(self, name)(*rest, **kwargs)
        finally:
            is_within = False

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    if method:  # its optional arguments
        bound = inspect.signature(getattr(model, method))
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = bound.replace(parameters=[this, *bound.parameters.values()])  # pyright: ignore[reportFunctionMemberAccess]
    members = {"__call__": call, "forward": forward, "__module__": cls.__module__}
    made: Any = type(cls)
    twin = object.__new__(made(cls.__name__, (cls,), members))
    twin.__dict__ = model.__dict__
    share_pending_steps(twin, pending_steps_of(model))
    return twin


class Methods:
    """What a wrapper gives in the place of bound methods of its model.

    Attributes:
        planned: name of a planned method -> the wrapper of the model's twin.
        told: names of methods that have trained without a budget.
    """

    def __init__(self) -> None:
        self.planned: dict[str, Any] = {}
        self.told: list[str] = []
        self._calls: dict[tuple[str, Any], Callable[..., Any]] = {}

    def replaced(self, value: Any, name: str, wrapper: nn.Module) -> Any:
        """An attribute of the model: planned, or watched if it is a bound method of a module."""
        is_bound = isinstance(value, types.MethodType)
        if name not in self.planned and not (is_bound and isinstance(value.__self__, nn.Module)):
            return value
        function = value.__func__ if is_bound else value
        if (name, function) not in self._calls:
            make = self._planned if name in self.planned else self._watched
            self._calls[name, function] = functools.wraps(function)(make(name, value, wrapper))
        return types.MethodType(
            self._calls[name, function], value.__self__ if is_bound else wrapper
        )

    def _planned(self, name: str, *_: Any) -> Callable[..., Any]:
        def planned(_: Any, *args: Any, **kwargs: Any) -> Any:
            output = self.planned[name]._run(args, kwargs)
            if self.planned[name].frames is not None:  # frames share the budget of all methods
                for each in self.planned.values():
                    each.take_frames()
            return output

        return planned

    def _watched(
        self, name: str, method: Callable[..., Any], wrapper: nn.Module
    ) -> Callable[..., Any]:
        def tell(advice: str, _: Any = None) -> None:
            if name not in self.told:
                self.told.append(name)
                msg = "no budget is kept for the method %s, by which this step trains. %s"
                logger.warning(msg, name, advice)

        def watched(_: Any, *args: Any, **kwargs: Any) -> Any:
            if name in self.told or not (wrapper.training and torch.is_grad_enabled()):
                return method(*args, **kwargs)
            with _gradients_watched(wrapper, partial(tell, _IN_PLACE)):
                output = method(*args, **kwargs)
            if any(each.grad_fn is not None for each in tensors_in(output)):
                names = [*dict.fromkeys((*self.planned, *self.told, name))]
                advice = f"To have it planned, write RockmateModule(model, ..., methods={names!r})."
                tell(_ABOVE % name if is_of_lightning(wrapper) else advice)
            return output

        return watched


@contextmanager
def _gradients_watched(model: nn.Module, tell: Callable[..., None]) -> Iterator[None]:
    """Has a function called when a gradient of a parameter arrives."""
    leaves = () if torch.compiler.is_compiling() else model.parameters()
    nodes = [
        get_gradient_edge(each).node
        for each in leaves
        if each.requires_grad and not (nn.parameter.is_lazy(each) or each.is_inference())
    ]
    handles = [node.register_prehook(tell) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
