"""plan_step: a training step that is a function over one or several modules.

A module is made that holds the modules and whose forward is the function; `RockmateModule` plans
it. The function calls the same modules, so their parameters are those of the step, and each has its
own mode.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rockmate._torch.pytree import tree_map_only
from rockmate.capture.compiled_model import plain_model
from rockmate.entry.module import RockmateModule
from rockmate.errors import InvalidArgumentError, InvalidSampleError, UnsupportedModelError
from rockmate.runtime.methods import is_of_lightning
from rockmate.runtime.model_checks import raise_as_eager

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
    `self.log` and `self.log_dict` of a LightningModule's method are called then, too.

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
        Exception: that of the function itself, where it raises in eager, too.
    """
    if loss_fn is None:
        return lambda function: plan_step(function, modules, sample, budget, **options)
    options["budget"] = budget
    is_named = any(isinstance(each, str) for each in _listed(modules))
    if isinstance(loss_fn, types.FunctionType) and (modules is None or is_named):
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
        model = step_module(function, modules)
        owner = getattr(function, "__self__", None)
        self._logs = is_of_lightning(owner)
        if self._logs:
            model.forward = _with_logs(function, owner)
        try:
            self.module = RockmateModule(model, sample, **options)
        except (UnsupportedModelError, InvalidSampleError) as error:
            from rockmate.capture.signature import SampleCall  # late, as all of the capture

            if sample is not None:
                call = SampleCall.of(sample)
                raise_as_eager(error, model, call.args, call.kwargs)
            raise
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result; errors as for `RockmateModule.forward`."""
        output = self.module(*args, **kwargs)
        if not self._logs:
            return output
        for name, given, keywords in output.pop("calls"):
            getattr(self.__wrapped__.__self__, name)(*given, **keywords)
        return output if output.pop("is_mapping") else output["loss"]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)

    def __repr__(self) -> str:
        return repr(self.module)


def _with_logs(function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    """A LightningModule's method that returns its calls of `self.log` with its result.

    In a planned step its Python does not run, and what it logs are results of the step.
    """

    def run(_: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        calls: list[Any] = []

        def log(name: str, *given: Any, **keywords: Any) -> None:
            detached = tree_map_only(Tensor, Tensor.detach, (given, keywords))
            calls.append((name, *detached))

        vars(owner).update({name: functools.partial(log, name) for name in ("log", "log_dict")})
        try:
            output = function(*args, **kwargs)
        finally:
            del vars(owner)["log"], vars(owner)["log_dict"]
        is_mapping = isinstance(output, Mapping)
        output = dict(output) if is_mapping else {"loss": output}
        return {**output, "calls": calls, "is_mapping": is_mapping}

    return types.MethodType(run, owner)  # so that what it reads of its owner is watched


class PlannedMethod:
    """A method whose calls are planned, for each object by itself."""

    def __init__(
        self, function: types.FunctionType, modules: Modules, options: dict[str, Any]
    ) -> None:
        self._function, self._given, self._options = function, modules, options
        self._name = function.__name__
        functools.update_wrapper(self, function)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The planned step of an object, which the object holds."""
        if instance is None:
            return self
        step = PlannedStep(self._function.__get__(instance), self._given, None, self._options)
        return vars(instance).setdefault(self._name, step)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises `InvalidArgumentError`: no module is known."""
        step_module(self._function, None)


class StepFunction(nn.Module):
    """The modules of a step; its forward is the function. Its mode is not that of the modules."""

    def __init__(self, function: Callable[..., Any], modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.forward = function
        for name, module in modules.items():
            name = name.replace(".", "_")
            self.add_module(f"{name}_" if hasattr(self, name) else name, module)

    def train(self, mode: bool = True) -> StepFunction:
        """Sets whether calls are planned; the modules keep their modes."""
        self.training = mode
        return self


def step_module(function: Callable[..., Any], modules: Modules) -> StepFunction:
    """The module of a step; arguments and errors are those of `plan_step`."""
    if isinstance(function, nn.Module):
        function = function.__call__
    plain: Any = function.func if isinstance(function, functools.partial) else function
    name = getattr(plain, "__name__", type(plain).__name__)
    owner = getattr(function, "__self__", None)
    if modules is None and not isinstance(owner, nn.Module):
        msg = f"no modules are given for {name}: write modules=[...], with all that it calls."
        raise InvalidArgumentError(msg)
    scope = _scope(function)
    names = {id(value): name for name, value in scope.items()}
    given = [scope.get(each, each) if isinstance(each, str) else each for each in _listed(modules)]
    found: Any = {names.get(id(each), f"module_{at}"): each for at, each in enumerate(given)}
    found = dict(modules) if isinstance(modules, Mapping) else found or {"module": owner}
    for module in found.values():
        plain_model(module)
    own = {name: each for name, each in scope.items() if isinstance(each, nn.Module)}
    stateless = {name: each for name, each in own.items() if not each.state_dict()}
    # A class by the name of the function, in its file: errors name it, and its globals count.
    cls: Any = type(name, (StepFunction,), {"__module__": plain.__module__ or __name__})
    return cls(function, {**stateless, **found})


def _listed(modules: Modules) -> list[Any]:
    if isinstance(modules, nn.Module | str):
        return [modules]
    return [] if modules is None or isinstance(modules, Mapping) else list(modules)


def _scope(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function finds by a name: closures, globals, attributes of its object."""
    owner = getattr(function, "__self__", None)
    own = dict(getattr(owner, "__dict__", {}))
    own |= owner.named_children() if isinstance(owner, nn.Module) else {}
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no function, or a cell without a value
        return own
    return {**found.globals, **found.nonlocals, **own}
