"""A module that behaves as the one that it wraps, whose objects and attributes are its own."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from rockmate._torch.fsdp import move_unit
from rockmate._torch.members import is_compiled
from rockmate.errors import UnsupportedModelError
from rockmate.runtime.methods import Methods


class ForwardOfModel:
    """Descriptor of `forward`: an instance's `forward` has the signature of the wrapped module's.

    It defines no `__set__`, so assigning to `module.forward` replaces it, as for any module.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self.function
        return types.MethodType(module.__dict__["_forward_of_model"], module)


def with_signature_of(model: nn.Module) -> Callable[..., Any]:
    """A wrapper's `forward`, which calls its `_run`, with the signature of the model's `forward`.

    Trainer reads it: it drops the columns of a data set that are not arguments.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    forward.__doc__ = model.forward.__doc__
    bound = inspect.signature(model.forward)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = bound.replace(parameters=[this, *bound.parameters.values()])  # pyright: ignore[reportFunctionMemberAccess]
    return forward


def delegate(name: str) -> Callable[..., Any]:
    """A method that calls the wrapped module's own version.

    It returns the wrapper where the wrapped module returns itself.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.original, name)(*args, **kwargs)
        return self if result is self.original else result

    method.__name__, method.__doc__ = name, f"The wrapped module's `{name}`."
    return method


def take_special_methods(wrapper: nn.Module, model: nn.Module) -> None:
    """Lets Python find the model's special methods (`model[0]`, `len(model)`) in the wrapper.

    Python looks for them in an object's type, so the wrapper becomes an instance of a subclass.
    """
    subclass = _with_special_methods(type(wrapper), type(model))
    # `wrapper.__class__` is the model's.
    object.__dict__["__class__"].__set__(wrapper, subclass)


@functools.lru_cache
def _with_special_methods(wrapper_type: type, model_type: type) -> type:
    """The type of a wrapper, with the special methods that only the model's type has."""
    names = [
        name
        for name in dir(model_type)
        if name.startswith("__")
        and name.endswith("__")
        and not hasattr(wrapper_type, name)
        and inspect.isroutine(inspect.getattr_static(model_type, name))
    ]
    if not names:
        return wrapper_type
    members = {name: delegate(name) for name in names}
    module, qualified = wrapper_type.__module__, wrapper_type.__qualname__
    return type(
        wrapper_type.__name__, (wrapper_type,),
        {**members, "__module__": module, "__qualname__": qualified, "__doc__": None},
    )  # fmt: skip


class Wrapper(nn.Module):
    """The wrapped module's class, mode, attributes and state."""

    _methods: Methods

    @property
    def __class__(self) -> type:
        # Libraries ask a model for its class: Trainer to find label names and to save it, PEFT to
        # find adapters.
        wrapped = self.__dict__.get("_wrapped")
        return type(self) if wrapped is None else wrapped.__class__

    @__class__.setter
    def __class__(self, cls: type) -> None:
        if move_unit(self, self.original):
            self.original.__class__ = cls
            return
        msg = (
            f"the class of a RockmateModule cannot be set to {cls.__name__}. Change the model "
            "first, then wrap it."
        )
        raise UnsupportedModelError(msg)

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped module's mode. `modules()` yields the wrapper in place of that module."""
        wrapped = self.__dict__.get("_wrapped")
        return wrapped is None or wrapped.training

    @training.setter
    def training(self, mode: bool) -> None:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is not None:  # `nn.Module.__init__` sets it before there is one
            wrapped.training = mode

    @property
    def original(self) -> nn.Module:
        """The module that was wrapped."""
        return self.__dict__["_wrapped"]

    train, eval, to, cuda, cpu = map(delegate, ("train", "eval", "to", "cuda", "cpu"))
    half, bfloat16, float, double = map(delegate, ("half", "bfloat16", "float", "double"))
    state_dict, load_state_dict = map(delegate, ("state_dict", "load_state_dict"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_wrapped" not in self.__dict__:
                raise
            return self._methods.replaced(getattr(self.original, name), name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute in the wrapped module, whose code reads it, but for the own ones."""
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is not None and name not in self.__dict__ and self._is_of(wrapped, name):
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    def _is_of(self, wrapped: nn.Module, name: str) -> bool:
        """Whether an attribute is the wrapped module's to set. Each has a `forward` of its own."""
        is_own = hasattr(type(self), name) or (name.startswith("_") and not is_compiled(wrapped))
        return name != "forward" and (name in wrapped.__dict__ or not is_own)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self.original)})
