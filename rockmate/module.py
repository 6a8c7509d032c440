"""RockmateModule: the model, training inside a budget."""

from __future__ import annotations

import copy
import inspect
import logging
import reprlib
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from rockmate.budget import Budget, parse_budget, size_text
from rockmate.errors import (
    InvalidBudgetError,
    RockmateError,
    UnsupportedModelError,
)
from rockmate.memory_limit import MemoryLimit, Optimizer
from rockmate.plan.plan import Plan
from rockmate.plan_cache import PlanCache
from rockmate.request import PlanRequest, planned_call_of
from rockmate.runtime.ddp import SHARDED
from rockmate.runtime.planned_call import PlannedCall

logger = logging.getLogger("rockmate")


class _Forward:
    """`forward` as a method whose signature is that of the wrapped module's; assigning to `module.forward` replaces it, as usual."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: RockmateModule | None, owner: type | None = None) -> Any:
        return (
            self.function
            if module is None
            else types.MethodType(module.__dict__["_forward_of_model"], module)
        )


def _delegate(name: str) -> Callable[..., Any]:
    """A method that calls the wrapped module's own version and returns this module in place of that."""

    def method(self: RockmateModule, *args: Any, **kwargs: Any) -> RockmateModule:
        getattr(self.original, name)(*args, **kwargs)
        self.training = self.original.training
        return self

    method.__name__, method.__doc__ = name, f"The wrapped module's `{name}`."
    return method


class RockmateModule(nn.Module):
    """A module that trains within a memory budget and is otherwise the module that it wraps.

    Parameters, buffers and submodules are the wrapped module's own objects under the same names, so `state_dict`, optimizers, `.to`,
    `.train` and attributes (`config`, `generate`, `save_pretrained`, ...) behave as before; `isinstance` and `__class__` tell the wrapped
    module's class, and `inspect.signature(module.forward)` its arguments. In training mode with gradients enabled a call runs the
    plan; in eval mode or under `no_grad` it runs the wrapped module.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any = None,
        budget: Budget | None = None,
        *,
        memory_limit: int | str | None = None,
        optimizer: Optimizer = "adamw",
        steps_in_backward: bool = False,
        plan: Plan | None = None,
        strategy: str | None = None,
        replan: bool = True,
        larger: Literal["plan", "refuse"] = "plan",
        **planner_options: Any,
    ) -> None:
        """Plans for one sample and one budget, or takes a plan that was made before.

        Args:
            model: a module in training mode, on the device that it will train on.
            sample_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments. None plans when the
                first training call comes, for that call.
            budget: the activation budget: bytes, "6GiB", or a fraction in (0, 1] of the sample's peak with nothing recomputed. When the
                module changes, it is that of the sample's shapes in the new state; with other keywords on a call that is smaller than
                the sample, the bytes of the sample's plan.
            memory_limit: instead of a budget, a bound on the whole device in bytes or as a size: parameters, gradients and the
                optimizer's state included; see `rockmate.memory_limit`.
            optimizer: with `memory_limit`, what will step: an optimizer, or the name or class of one that is not made yet.
            steps_in_backward: with `memory_limit`, that each parameter is stepped, and its gradient freed, within the backward.
            plan: instead of a budget, a plan for the same model and sample (`Plan.load`): nothing is measured or solved.
            strategy: how to plan; see `Planner.plan`. The default is the one that finds the fastest plans.
            replan: plan anew, and say so in one line of the log, when the module has changed since (device, dtype, new rows, what is
                frozen, autocast, modes) or a call has other keywords or shapes, or an input begins to require a gradient; False raises
                `SignatureMismatchError` instead, as is always done with a `plan`. Shapes no larger than the sample's take over its
                schedule.
            larger: "refuse" raises `SignatureMismatchError` for a call with a tensor larger than the sample's; "plan" plans for it,
                within the same bytes.
            **planner_options: as for `Planner`; a plan brings those that it was made with.

        Raises:
            InvalidBudgetError, InfeasibleBudgetError, InvalidSampleError, UnsupportedModelError: as `Planner` and `Planner.plan`; the
                first also where neither budget nor plan is given.
            PlanMismatchError: the plan was made for another model or sample.
            TypeError: more than one of budget, memory limit and plan is given, a plan with options or without a sample, or a plan that
                is none.
        """
        _check_arguments(budget, memory_limit, plan)
        if larger not in ("plan", "refuse"):
            msg = f"larger is {larger!r}; choose 'plan' or 'refuse'"
            raise ValueError(msg)
        self._wrap(model)
        if plan is not None:
            _check_plan_arguments(plan, sample_input, strategy, planner_options)
            self._plans = PlanCache(model)
            self._plans.adopt(planned_call_of(plan, model, sample_input))
            self._plans.runnables[0].warn_of_hooks(model)
            return
        request = PlanRequest(
            budget=budget,
            memory_limit=_memory_limit(memory_limit, optimizer, steps_in_backward),
            strategy=strategy or "rockmate",
            options=planner_options,
        )
        self._plans = PlanCache(model, request, replans=replan, refuses_larger=larger == "refuse")
        if sample_input is not None:
            self._plans.plan_for_sample(sample_input)

    @classmethod
    def of(cls, model: nn.Module, call: PlannedCall) -> RockmateModule:
        """A module for a call that has been planned; see `Planner.module`."""
        module = cls.__new__(cls)
        module._wrap(model)
        module._plans.adopt(call)
        return module

    def _wrap(self, model: nn.Module) -> None:
        super().__init__()
        # The very dictionaries of the wrapped module: whatever is registered, moved or replaced in one is so in the other.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(model, name)
        self.__dict__["_wrapped"] = model
        self.__dict__["_forward_of_model"] = _with_signature_of(model)
        self.training = model.training
        self._plans = PlanCache(model)
        self._num_runs = 0

    @property
    def __class__(self) -> type:
        # Libraries ask a model for its class: Trainer for label names and whether it can be saved, PEFT whether it has adapters.
        wrapped = self.__dict__.get("_wrapped")
        return type(self) if wrapped is None else wrapped.__class__

    @__class__.setter
    def __class__(self, cls: type) -> None:
        msg = f"a RockmateModule stays one, and cannot become a {cls.__name__}. If this is fully_shard: {SHARDED}"
        raise UnsupportedModelError(msg)

    @property
    def original(self) -> nn.Module:
        """The module that was wrapped."""
        return self.__dict__["_wrapped"]

    @property
    def plan(self) -> Plan:
        """What was promised, by the plan in use.

        Raises:
            RockmateError: there was no sample, and no training call yet.
        """
        if not self._plans.runnables:
            msg = "nothing is planned yet: the module was made without a sample, so it plans when it is first called in training mode."
            raise RockmateError(msg)
        return self._plans.runnables[0].planned.plan

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan; one without a sample is made at the first training call."""
        return bool(self._plans.runnables)

    @_Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward: planned in training, as it is otherwise.

        Raises:
            SignatureMismatchError: in training, the call differs from what was planned for in a constant, dtype or device; a tensor is
                larger than planned for and `larger` is "refuse"; or the call or the module's state differs in any way, and the module
                was made with a plan or with `replan=False`.
            InfeasibleBudgetError, InvalidSampleError, UnsupportedModelError: what is planned now cannot be.
        """
        return self._run(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, with the module's hooks.

        Raises:
            RockmateError: in training, a `forward` that was assigned to the module after wrapping ran without the planned one.
        """
        if "forward" not in self.__dict__:
            return super().__call__(*args, **kwargs)
        num_before = self._num_runs
        output = super().__call__(*args, **kwargs)
        if self._num_runs == num_before and self.training and torch.is_grad_enabled():
            msg = (
                "forward was replaced after the model was wrapped, and the new one does not call the planned forward, so nothing ran "
                "inside the budget. Wrap last: for a trainer that replaces it (TRL's), make the trainer with the plain model, then "
                "rockmate.wrap_trainer(trainer, budget)."
            )
            raise RockmateError(msg)
        return output

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _run_outside_dynamo(self, args, kwargs)
        # Past `nn.Module.__setattr__`, which takes as long as an op.
        self.__dict__["_num_runs"] += 1
        if not (self.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        return self._plans.run(args, kwargs)

    train, eval, to, cuda, cpu = map(_delegate, ("train", "eval", "to", "cuda", "cpu"))
    half, bfloat16, float, double = map(_delegate, ("half", "bfloat16", "float", "double"))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        return self.original.load_state_dict(state_dict, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RockmateModule:
        """A copy of the wrapped module under the same plan; with untraced submodules it is planned anew, for its first training call."""
        model = copy.deepcopy(self.original, memo)
        module = type(self).__new__(type(self))
        module._wrap(model)
        module._plans = self._plans.copy_for(model)
        return memo.setdefault(id(self), module)

    def __reduce__(self) -> Any:
        """Refuses to be pickled."""
        msg = "a RockmateModule holds generated code and is not pickled. Save its state_dict(), or pickle `module.original`."
        raise TypeError(msg)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_wrapped" not in self.__dict__:
                raise
            return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets it on the wrapped module, if it is a plain attribute of that: its code reads it there."""
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is not None and name in wrapped.__dict__ and name not in self.__dict__:
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Names of both modules."""
        return sorted({*dir(type(self)), *self.__dict__, *dir(self.original)})

    def __repr__(self) -> str:
        """The wrapped module, with one line on the plan."""
        return f"RockmateModule(\n  {self._plan_text()}\n  {repr(self.original).replace(chr(10), chr(10) + '  ')}\n)"

    def _plan_text(self) -> str:
        if not self._plans.runnables:
            return "(not planned yet)"
        plan = self.plan
        return (
            f"(budget {size_text(plan.budget_bytes)}, predicted peak {size_text(plan.predicted_peak_bytes)} at "
            f"{plan.predicted_ratio:.3f}x of the time without recomputation)"
        )


def _run_planned(module: RockmateModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A call from code that `torch.compile` compiles, or of a module that it was given: the plan runs as it is."""
    return module._run(args, kwargs)


_run_outside_dynamo: Callable[..., Any] = torch.compiler.disable(_run_planned)


def _check_arguments(
    budget: Budget | None, memory_limit: int | str | None, plan: Plan | None
) -> None:
    names = [
        name
        for name, value in (("budget", budget), ("memory_limit", memory_limit), ("plan", plan))
        if value is not None
    ]
    if not names:
        msg = (
            'budget None: give RockmateModule a budget (bytes, "6GiB", or a fraction in (0, 1]), a memory_limit for the whole device, '
            "or a plan."
        )
        raise InvalidBudgetError(msg)
    if len(names) > 1:
        msg = f"RockmateModule was given {' and '.join(names)}; give one of them. A plan has its budget, plan.budget_bytes."
        raise TypeError(msg)
    if plan is not None and not isinstance(plan, Plan):
        msg = (
            f"plan {reprlib.repr(plan)} is of type {type(plan).__name__}, and a Plan is needed. Give plan=Plan.load(path) for a file that "
            "Plan.save wrote, or what Planner.plan has returned."
        )
        raise TypeError(msg)
    if budget is not None:
        parse_budget(
            budget, 1 << 62
        )  # one that cannot be read is told before the work, not after it


def _check_plan_arguments(
    plan: Plan, sample_input: Any, strategy: str | None, options: Mapping[str, Any]
) -> None:
    """Raises `TypeError` for what cannot be given together with a plan, and for a missing sample."""
    given = [*options, *(["strategy"] if strategy else [])]
    if not given and sample_input is not None:
        return
    made_with = {"strategy": plan.strategy, **plan.options}
    settings = ", ".join(f"{name}={value!r}" for name, value in made_with.items())
    if given:
        what = f"{', '.join(given)} cannot be given"
        next_step = "Leave that out, or give a budget instead of the plan."
    else:
        what = "a sample must be given, too,"
        next_step = "Give the sample that it was made for."
    msg = f"{what} with a plan, which has been made with {settings}. {next_step}"
    raise TypeError(msg)


def _memory_limit(
    limit: int | str | None, optimizer: Optimizer, steps_in_backward: bool
) -> MemoryLimit | None:
    if limit is None:
        return None
    return MemoryLimit(limit=limit, optimizer=optimizer, steps_in_backward=steps_in_backward)


def _with_signature_of(model: nn.Module) -> Callable[..., Any]:
    """`RockmateModule.forward` as a function that states the arguments of the model's: Trainer drops columns that are not among them."""

    def forward(self: RockmateModule, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    forward.__doc__ = model.forward.__doc__
    bound = inspect.signature(model.forward)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = bound.replace(parameters=[this, *bound.parameters.values()])  # pyright: ignore[reportFunctionMemberAccess]
    return forward
