"""RockmateModule: the model, training inside a budget."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rockmate.budget import Budget, parse_budget, size_text
from rockmate.emit import Program
from rockmate.errors import InvalidBudgetError, SignatureMismatchError
from rockmate.plan import Plan
from rockmate.runtime import Runner
from rockmate.signature import CallSignature, ModelSignature, check_call, flatten_call, optional_keywords
from rockmate.structure import Structure


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedCall:
    """A plan with what it takes to run it, apart from the module.

    Attributes:
        plan: the plan.
        program: its two functions.
        call: signature of the calls that it serves.
        state: of the module that it was made for.
        output_structure: rebuilds the model's output from its tensors.
    """

    plan: Plan
    program: Program
    call: CallSignature
    state: ModelSignature
    output_structure: Structure


class RockmateModule(nn.Module):
    """A module that trains within an activation budget and is otherwise the module that it wraps.

    Parameters, buffers and submodules are the wrapped module's own objects under the same names, so `state_dict`, optimizers, `.to`,
    `.train` and attributes (`config`, `generate`, ...) behave as before. In training mode with gradients enabled a call runs the
    plan; in eval mode or under `no_grad` it runs the wrapped module.

    Attributes:
        plan: what was promised.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        budget: Budget | None = None,
        *,
        plan: Plan | None = None,
        strategy: str | None = None,
        **planner_options: Any,
    ) -> None:
        """Plans for one sample and one budget, or takes a plan that was made before.

        Args:
            model: a module in training mode, on the device that it will train on.
            sample_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
            budget: the activation budget: bytes, "6GiB", or a fraction in (0, 1] of the peak with nothing recomputed.
            plan: instead of a budget, a plan for the same model and sample (`Plan.load`): nothing is measured or solved.
            strategy: how to plan; see `Planner.plan`. The default is the one that finds the fastest plans.
            **planner_options: as for `Planner`; a plan brings those that it was made with.

        Raises:
            InvalidBudgetError, InfeasibleBudgetError, InvalidSampleError, UnsupportedModelError: as `Planner` and `Planner.plan`; the
                first also where neither budget nor plan is given.
            PlanMismatchError: the plan was made for another model or sample.
            TypeError: both budget and plan are given, or a plan with options.
        """
        if budget is None and plan is None:
            msg = "budget None: give RockmateModule a budget (bytes, \"6GiB\", or a fraction in (0, 1]) or a plan."
            raise InvalidBudgetError(msg)
        if budget is not None and plan is not None:
            msg = "give RockmateModule a budget or a plan, and not both: a plan has its budget, plan.budget_bytes."
            raise TypeError(msg)
        if plan is not None:
            from rockmate.step import capture_step

            if planner_options or strategy:
                given = [*planner_options, *(["strategy"] if strategy else [])]
                msg = f"{', '.join(given)} cannot be given with a plan, which has been made with {dict(plan.options)}."
                raise TypeError(msg)
            options: dict[str, Any] = dict(plan.options)
            self._wrap(model, capture_step(model, sample_input, **options).planned_call(plan))
        elif budget is not None:
            from rockmate.planner import Planner

            parse_budget(budget, 1 << 62)  # a budget that cannot be read is told before the work, not after it
            self._wrap(model, Planner(model, sample_input, **planner_options).planned_call(budget, strategy=strategy or "rockmate"))

    @classmethod
    def of(cls, model: nn.Module, call: PlannedCall) -> RockmateModule:
        """A module for a call that has been planned; see `Planner.module`."""
        module = cls.__new__(cls)
        module._wrap(model, call)
        return module

    def _wrap(self, model: nn.Module, call: PlannedCall) -> None:
        super().__init__()
        # The very dictionaries of the wrapped module: whatever is registered, moved or replaced in one is so in the other.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(model, name)
        self.__dict__["_wrapped"] = model
        self.training = model.training
        self.plan = call.plan
        self._planned = call
        self._optional = optional_keywords(model)
        self._runner = Runner(call.program, model)

    @property
    def original(self) -> nn.Module:
        """The module that was wrapped."""
        return self.__dict__["_wrapped"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward: planned in training, as it is otherwise.

        Raises:
            SignatureMismatchError: in training, the call or the module's state differs from what was planned for.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        tensors, call = flatten_call(args, kwargs, self._optional)
        check_call(self._planned.call, call)
        changed = self._planned.state.difference(ModelSignature.of(self.original))
        if changed:
            msg = f"the module has changed since it was planned: {changed}. Change it back, or make a new RockmateModule."
            raise SignatureMismatchError(msg)
        return self._planned.output_structure.rebuild(list(self._runner.run(tensors)))

    def train(self, mode: bool = True) -> RockmateModule:
        """Sets the mode of the wrapped module and of this one."""
        self.original.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        return self.original.load_state_dict(state_dict, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> RockmateModule:
        """A copy of the wrapped module under the same plan."""
        model = copy.deepcopy(self.original, memo)
        call = replace(self._planned, state=ModelSignature.of(model))
        return memo.setdefault(id(self), type(self).of(model, call))

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

    def extra_repr(self) -> str:
        """One line on the plan."""
        plan = self.plan
        return (
            f"budget {size_text(plan.budget_bytes)}, predicted peak {size_text(plan.predicted_peak_bytes)} at "
            f"{plan.predicted_ratio:.3f}x of the time without recomputation"
        )
