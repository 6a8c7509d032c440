"""What a wrapper takes from the module that it wraps: methods, and the signature of `forward`."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn


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
