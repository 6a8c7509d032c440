"""RockmateModule: the model, training inside a budget."""

from __future__ import annotations

import copy
import inspect
import logging
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rockmate.budget import Budget, parse_budget, size_text
from rockmate.capture.opaque_module import opaque_modules, opaque_names
from rockmate.capture.signature import (
    CallSignature,
    ModelSignature,
    SampleCall,
    check_call,
    differs_in_keywords,
    differs_in_shapes,
    flatten_call,
    has_same_form,
    is_no_larger,
    optional_keywords,
    resized_call,
)
from rockmate.errors import (
    InfeasibleBudgetError,
    InvalidBudgetError,
    RockmateError,
    SignatureMismatchError,
    UnsupportedModelError,
)
from rockmate.memory_limit import MemoryLimit, Optimizer
from rockmate.plan.plan import Plan
from rockmate.plan_cache import MAX_PLANS, PlannedSample, RunnableCall
from rockmate.request import PlanRequest
from rockmate.runtime.ddp import SHARDED, finds_unused_parameters
from rockmate.runtime.non_differentiable import forbid_gradient
from rockmate.runtime.planned_call import PlannedCall
from rockmate.step_family import StepFamily

if TYPE_CHECKING:
    from rockmate.step import CapturedStep

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
            from rockmate.step import capture_step

            given = [*planner_options, *(["strategy"] if strategy else [])]
            if given or sample_input is None:
                what = (
                    f"{', '.join(given)} cannot be given"
                    if given
                    else "a sample must be given, too,"
                )
                made_with = ", ".join(
                    f"{name}={value!r}"
                    for name, value in {"strategy": plan.strategy, **plan.options}.items()
                )
                way_out = (
                    "Leave that out, or give a budget instead of the plan."
                    if given
                    else "Give the sample that it was made for."
                )
                msg = f"{what} with a plan, which has been made with {made_with}. {way_out}"
                raise TypeError(msg)
            options: dict[str, Any] = dict(plan.options)
            self._use(
                capture_step(model, sample_input, **{"hooked": "", **options}).planned_call(plan)
            )
            self._runnables[0].warn_of_hooks(model)
            return
        limit = None
        if memory_limit is not None:
            limit = MemoryLimit(
                limit=memory_limit, optimizer=optimizer, steps_in_backward=steps_in_backward
            )
        request = PlanRequest(
            budget=budget,
            memory_limit=limit,
            strategy=strategy or "rockmate",
            options=planner_options,
        )
        self._request = request if replan or sample_input is None else None
        self._replan = replan
        self._refuses_larger = larger == "refuse"
        if sample_input is not None:
            self._use(request.planned_call(model, sample_input))
            self._samples.append(PlannedSample(self._runnables[0].planned.call))

    @classmethod
    def of(cls, model: nn.Module, call: PlannedCall) -> RockmateModule:
        """A module for a call that has been planned; see `Planner.module`."""
        module = cls.__new__(cls)
        module._wrap(model)
        module._use(call)
        return module

    def _wrap(self, model: nn.Module) -> None:
        super().__init__()
        # The very dictionaries of the wrapped module: whatever is registered, moved or replaced in one is so in the other.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(model, name)
        self.__dict__["_wrapped"] = model
        self.__dict__["_forward_of_model"] = _with_signature_of(model)
        self.training = model.training
        self._optional = optional_keywords(model)
        self._request: PlanRequest | None = None
        self._replan = self._refuses_larger = False
        self._runnables: list[RunnableCall] = []  # the one in use first
        self._samples: list[PlannedSample] = []  # one for each set of keywords
        self._num_runs = 0

    def _use(
        self, call: PlannedCall, family: StepFamily | None = None, *, is_adapted: bool = False
    ) -> None:
        family = family or StepFamily(self.original, call)
        self._runnables.insert(0, RunnableCall(call, self.original, family, is_adapted=is_adapted))
        if (
            len(self._runnables) > MAX_PLANS
        ):  # what has been planned for serves other shapes, too, so it goes last
            adapted = [
                place
                for place, runnable in enumerate(self._runnables)
                if place and runnable.is_adapted
            ]
            del self._runnables[adapted[-1] if adapted else MAX_PLANS]

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
        if not self._runnables:
            msg = "nothing is planned yet: the module was made without a sample, so it plans when it is first called in training mode."
            raise RockmateError(msg)
        return self._runnables[0].planned.plan

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan; one without a sample is made at the first training call."""
        return bool(self._runnables)

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
                "rockmate.trainer.wrap_trainer(trainer, budget)."
            )
            raise RockmateError(msg)
        return output

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _run_outside_dynamo(self, args, kwargs)
        self.__dict__["_num_runs"] += (
            1  # past `nn.Module.__setattr__`, which takes as long as an op
        )
        if not (self.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        tensors, call = flatten_call(args, kwargs, self._optional)
        runnable = self._runnable_for(call, tensors)
        outputs = list(runnable.runner.run(tensors, hooks_last=finds_unused_parameters()))
        for index in runnable.planned.non_differentiable_outputs:
            outputs[index] = forbid_gradient(outputs[index])
        return runnable.planned.output_structure.rebuild(outputs)

    def _runnable_for(self, call: CallSignature, tensors: Sequence[Tensor]) -> RunnableCall:
        """The one in use if it fits, else one that does: an earlier one, or one that is planned now."""
        if not self._runnables:
            return self._planned_now("this is the first training call", call, tensors)
        first = self._runnables[0]
        changed = first.difference(self.original, replans=self._replan)
        if not changed and call == first.planned.call:
            return first
        if not self._replan:
            check_call(first.planned.call, call)
            msg = f"the module has changed since it was planned: {changed}. Change it back, or make a new RockmateModule."
            raise SignatureMismatchError(msg)
        if changed:
            for runnable in self._runnables:
                runnable.runner.release_accumulators()
        fitting = [
            runnable for runnable in self._runnables if not runnable.difference(self.original)
        ]
        for runnable in fitting:
            if call == runnable.planned.call:
                self._runnables.remove(runnable)
                self._runnables.insert(0, runnable)
                return runnable
        self._check_size(call)
        alike = [runnable for runnable in fitting if differs_in_shapes(runnable.planned.call, call)]
        if alike:
            return self._planned_for_shapes(alike, call, tensors)
        return self._planned_now(changed or self._difference_in(call), call, tensors)

    def _difference_in(self, call: CallSignature) -> str:
        """What there is in a call that has not been planned for, in words; an error if that is neither keywords nor shapes."""
        known = [sample.call for sample in self._samples]
        if any(call.kind == sample.kind for sample in known):
            return "an input requires a gradient that did not, or the other way"
        alike = next((sample for sample in known if call.keywords == sample.keywords), None)
        if alike is not None or not differs_in_keywords(known[0], call):
            check_call(alike or known[0], call)
        return "the call has other keywords than the sample"

    def _check_size(self, call: CallSignature) -> None:
        """Raises for a call that is larger than every sample, in the arguments that both have, if such are refused."""
        pairs = (
            [(call.part_in(sample.call), sample.call.part_in(call)) for sample in self._samples]
            if self._refuses_larger
            else []
        )
        sized = [pair for pair in pairs if has_same_form(*pair)]
        if sized and not any(is_no_larger(*pair) for pair in sized):
            check_call(self._samples[0].call, call)

    def _planned_for_shapes(
        self, alike: Sequence[RunnableCall], call: CallSignature, tensors: Sequence[Tensor]
    ) -> RunnableCall:
        """Takes over the schedule of a larger sample if there is one, else plans within the bytes of the plan in use."""
        alike = [runnable for runnable in alike if not runnable.is_adapted] or alike[
            :1
        ]  # which may be the last of its kind
        larger = [
            runnable.planned for runnable in alike if is_no_larger(call, runnable.planned.call)
        ]
        family = alike[-1].family  # all of them are of one
        adapted = family.resized(larger[-1], call) if larger else None
        if adapted is None:
            step = family.step(SampleCall(*call.structure.rebuild(list(tensors))), call)
            shaped = step.in_form_of(larger[-1].plan) if larger else step
            plan = shaped.adapted(larger[-1].plan) if larger else None
            if plan is None:
                return self._planned_within(step, family, alike[-1].planned.plan.budget_bytes)
            adapted = shaped.planned_call(plan)
        self._use(adapted, family, is_adapted=True)
        logger.info("the schedule of the sample serves smaller tensors: %s", call)
        return self._runnables[0]

    def _planned_within(
        self, step: CapturedStep, family: StepFamily, budget_bytes: int
    ) -> RunnableCall:
        assert self._request is not None
        try:
            planned = self._request.planned_call_for_step(step, budget_bytes)
        except InfeasibleBudgetError as error:
            advice = (
                "The budget is that of the sample, whose tensors have other shapes than this call's: give the largest batch as the sample "
                "(without one the first training batch is it)."
            )
            raise error.advised(advice) from None
        self._use(planned, family)
        self._log_plan("its tensors have other shapes than the sample's")
        return self._runnables[0]

    def _planned_now(
        self, reason: str, call: CallSignature, tensors: Sequence[Tensor]
    ) -> RunnableCall:
        """Plans for the call at the sizes of the sample with its keywords, of whose peak the budget may be a share."""
        assert self._request is not None
        sample = next(
            (sample for sample in self._samples if has_same_form(sample.call, call)), None
        )
        if sample is None:
            sample = PlannedSample(call, self._share_bytes(call))
        planned = self._request.planned_call(
            self.original, resized_call(tensors, call, sample.call), share_bytes=sample.share_bytes
        )
        if sample not in self._samples:
            self._samples.append(sample)
        self._use(planned)
        self._log_plan(reason)
        if planned.call == call:
            return self._runnables[0]
        return self._planned_for_shapes(self._runnables[:1], call, tensors)

    def _share_bytes(self, call: CallSignature) -> int | None:
        """What a share of the sample's peak stands for in a call with other keywords; None if that has the size of a sample."""
        pairs = [(sample.call.part_in(call), call.part_in(sample.call)) for sample in self._samples]
        is_sample_sized = any(
            pair[0].tensors and has_same_form(*pair) and is_no_larger(*pair) for pair in pairs
        )
        if not self._runnables or is_sample_sized:
            return None
        fitting = [
            runnable for runnable in self._runnables if not runnable.difference(self.original)
        ]
        return (fitting or self._runnables)[0].planned.plan.budget_bytes

    def _log_plan(self, reason: str) -> None:
        plan = self.plan
        logger.warning(
            "planned for this call, since %s: predicted peak %s within %s, %.3fx of the time without recomputation",
            reason, size_text(plan.predicted_peak_bytes), size_text(plan.budget_bytes), plan.predicted_ratio,
        )  # fmt: skip

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
        module._request, module._replan, module._refuses_larger = (
            self._request,
            self._replan,
            self._refuses_larger,
        )
        module._samples = list(self._samples)
        planned = next(
            (runnable.planned for runnable in self._runnables if not runnable.is_adapted), None
        )
        apart = planned is not None and bool(
            opaque_modules(self.original, opaque_names(planned.plan.options))
        )
        if apart and self._request is None:
            msg = (
                "the plan runs untraced submodules of the module that it was loaded for, so a copy cannot share it. Copy the model itself "
                "(`module.original`), and load the plan for the copy."
            )
            raise RockmateError(msg)
        if planned is not None and not apart:
            module._use(replace(planned, state=ModelSignature.of(model)))
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
        if not self._runnables:
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


def _with_signature_of(model: nn.Module) -> Callable[..., Any]:
    """`RockmateModule.forward` as a function that states the arguments of the model's: Trainer drops columns that are not among them."""

    def forward(self: RockmateModule, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    forward.__doc__ = model.forward.__doc__
    bound = inspect.signature(model.forward)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = bound.replace(parameters=[this, *bound.parameters.values()])  # pyright: ignore[reportFunctionMemberAccess]
    return forward
