"""plan_step: a training step that is a function over one or several modules.

A module is made that holds the modules and whose forward is the function; `RockmateModule` plans
it. The function calls the same modules, so their parameters are those of the step, and each has its
own mode.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rockmate.errors import InvalidArgumentError, UnsupportedModelError
from rockmate.module import RockmateModule

if TYPE_CHECKING:
    from rockmate.budget import Budget

    Modules = nn.Module | Iterable[nn.Module | str] | Mapping[str, nn.Module] | None


def plan_step(
    loss_fn: Callable[..., Any] | None = None,
    modules: Modules = None,
    sample: Any = None,
    budget: Budget | None = None,
    **options: Any,
) -> Any:
    """Plans a function that computes a loss with one or several modules, within one budget.

    Examples:
        >>> step = plan_step(loss_fn, [policy, reference], budget="20GiB")  # doctest: +SKIP
        >>> step(batch).backward()                                          # doctest: +SKIP

        >>> @plan_step(modules=[generator, critic], budget=0.5)             # doctest: +SKIP
        ... def penalty(real, fake): ...

    Gradients of all parameters, and of inputs, are eager's. Modules may be frozen, or run under
    `no_grad`. Each keeps its own mode, train or eval, and the step is planned in either; under
    `no_grad` the function runs as it is. What the function reads by `item()` or `tolist()`, and
    only puts into containers, attributes or its output, is put there after each planned forward.

    Args:
        loss_fn: returns a loss, or a mapping with one under "loss". A function, a bound method or a
            module. None gives a decorator.
        modules: all that it calls, in a list or by name; those without parameters and buffers are
            found. For a method of a class, names of attributes; None is the object itself.
        sample: as `sample_input` of `RockmateModule`. With None, the first call is the sample.
        budget: as for `RockmateModule`.
        **options: as for `RockmateModule`.

    Returns:
        A `PlannedStep`, called like the function; or a decorator that gives one.

    Raises:
        InvalidArgumentError: a module is none, is planned already, or is not given.
        UnsupportedModelError: the function calls a module that was not given.
        RockmateError: as for `RockmateModule`.
    """
    if loss_fn is None:
        return lambda function: plan_step(function, modules, sample, budget, **options)
    options["budget"] = budget
    if isinstance(loss_fn, types.FunctionType) and _is_of_object(modules):
        return PlannedMethod(loss_fn, modules, options)
    return PlannedStep(loss_fn, modules, sample, options)


class PlannedStep:
    """A planned function, called like it; all else is that of its `RockmateModule`.

    Attributes:
        module: the `RockmateModule`, as for `DistributedDataParallel`.
    """

    def __init__(
        self, function: Callable[..., Any], modules: Modules, sample: Any, options: dict[str, Any]
    ) -> None:
        """Plans for a sample, or else at the first call; arguments are those of `plan_step`."""
        self.module = RockmateModule(step_module(function, modules), sample, **options)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result; errors as for `RockmateModule.forward`."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)

    def __repr__(self) -> str:
        return repr(self.module)


class PlannedMethod:
    """A method whose calls are planned, for each object by itself."""

    def __init__(
        self, function: types.FunctionType, modules: Modules, options: dict[str, Any]
    ) -> None:
        """Plans nothing yet; arguments are those of `plan_step`."""
        self._function, self._modules, self._options = function, modules, options
        self._name = function.__name__
        functools.update_wrapper(self, function)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The planned step of an object, which the object holds."""
        if instance is None:
            return self
        step = PlannedStep(self._function.__get__(instance), self._modules, None, self._options)
        return vars(instance).setdefault(self._name, step)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises `InvalidArgumentError`: no module is known."""
        msg = (
            f"no modules are given for {self._function.__name__}: write "
            "rockmate.plan_step(modules=[...], budget=...), with all that it calls."
        )
        raise InvalidArgumentError(msg)


class StepFunction(nn.Module):
    """The modules of a step; its forward is the function. A mode of its own means nothing to them.

    Attributes:
        function: the function.
    """

    def __init__(self, function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> None:
        """Takes the modules by name."""
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        with self._others_refused():
            return self.function(*args, **kwargs)

    def train(self, mode: bool = True) -> StepFunction:
        """Sets whether calls are planned; the modules keep their modes."""
        self.training = mode
        return self

    @contextmanager
    def _others_refused(self) -> Iterator[None]:
        """Raises in a capture for a module that is not among those of the step."""
        if not torch.compiler.is_compiling():
            yield
            return
        own = set(map(id, self.modules()))

        def check(module: nn.Module, _: Any) -> None:
            if id(module) not in own:
                name = _names_in_scope(self.function).get(id(module), "")
                what = f"{name}, a {type(module).__name__}" if name else type(module).__name__
                msg = (
                    f"{type(self).__name__} calls {what}, which is not among its modules: add it "
                    "to the list, modules=[...], with all else that it calls."
                )
                raise UnsupportedModelError(msg)

        handle = register_module_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()


def step_module(function: Callable[..., Any], modules: Modules) -> StepFunction:
    """The module of a step; arguments and errors are those of `plan_step`."""
    is_module = isinstance(function, nn.Module)
    owner = function if is_module else getattr(function, "__self__", None)
    if modules is None and not isinstance(owner, nn.Module):
        name = getattr(function, "__name__", type(function).__name__)
        msg = f"no modules are given for {name}: write modules=[...], with all that it calls."
        raise InvalidArgumentError(msg)
    scope = _names_in_scope(function)
    if isinstance(modules, Mapping):
        named = list(modules.items())
    else:
        if modules is None or isinstance(modules, nn.Module | str):
            modules = [owner if modules is None else modules]
        named = [
            (each, getattr(owner, each, None)) if isinstance(each, str) else ("", each)
            for each in modules
        ]
    found: dict[str, nn.Module] = {}
    for index, (given, module) in enumerate(named):
        name = given or scope.get(id(module)) or f"module_{index}"
        _check(given or name, module)
        name = name.replace(".", "_")
        found[f"{name}_" if hasattr(nn.Module, name) or name in found else name] = module
    known = {id(each) for module in found.values() for each in module.modules()}
    for name, module in _scope(function).items():
        is_other = isinstance(module, nn.Module) and id(module) not in known
        if is_other and not module.state_dict():
            found.setdefault(name, module)
    return _class_of(function)(function, found)


def _class_of(function: Callable[..., Any]) -> type[StepFunction]:
    """A class by the name of the function, in its file: errors name it, and its globals count."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return StepFunction.forward(self, *args, **kwargs)

    bound = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    rest = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY) if each.name == "self" else each
        for each in bound.parameters.values()
    ]
    forward.__signature__ = bound.replace(parameters=[this, *rest])  # pyright: ignore[reportFunctionMemberAccess]
    named: Any = function.func if isinstance(function, functools.partial) else function
    name = getattr(named, "__name__", type(function).__name__)
    members = {"forward": forward, "__module__": named.__module__, "__doc__": named.__doc__}
    return type(name, (StepFunction,), members)


def _is_of_object(modules: Modules) -> bool:
    """Whether modules are given by names of attributes, or as the object that a method is of."""
    is_listed = isinstance(modules, list | tuple)
    return (
        modules is None
        or isinstance(modules, str)
        or (is_listed and any(isinstance(each, str) for each in modules))
    )


def _check(name: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        msg = (
            f"modules has {name}, a {type(module).__name__}, and no nn.Module. A parameter stands "
            "in a module, by which the function reads it."
        )
        raise InvalidArgumentError(msg)
    if any("_wrapped" in vars(each) for each in module.modules()):
        msg = f"modules has {name}, which is planned already. Give the plain one, {name}.original."
        raise InvalidArgumentError(msg)


def _scope(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function finds by a name: closures, globals, attributes of its object."""
    owner = getattr(function, "__self__", None)
    own = dict(owner.named_children()) if isinstance(owner, nn.Module) else {}
    own |= {name: each for name, each in getattr(owner, "__dict__", {}).items() if name[:1] != "_"}
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no function, or a cell without a value
        return own
    return {**found.globals, **found.nonlocals, **own}


def _names_in_scope(function: Callable[..., Any]) -> dict[int, str]:
    return {id(value): name for name, value in _scope(function).items()}
