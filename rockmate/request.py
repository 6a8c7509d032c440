"""How to plan, kept so that it can be done again: when the first batch is there, and when the module has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from rockmate.agreement import agreed_plan
from rockmate.budget import Budget
from rockmate.errors import PlanMismatchError
from rockmate.memory_limit import MemoryLimit

if TYPE_CHECKING:
    from rockmate.module import PlannedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the user asked for.

    Attributes:
        budget: the activation budget; None where `memory_limit` bounds the whole device.
        memory_limit: that bound.
        strategy: how to plan.
        options: as for `Planner`.
    """

    budget: Budget | None = None
    memory_limit: MemoryLimit | None = None
    strategy: str = "rockmate"
    options: Mapping[str, Any] = field(default_factory=dict)

    def planned_call(self, model: nn.Module, sample_input: Any, *, budget_bytes: int | None = None) -> PlannedCall:
        """Captures, measures and plans; errors as for `Planner` and `Planner.plan`, and of `MemoryLimit.activation_budget_bytes`.

        Args:
            model: the model.
            sample_input: as for `Planner`.
            budget_bytes: in place of the budget, a share of which would be another number of bytes for another sample.
        """
        from rockmate.planner import Planner

        planner = Planner(model, sample_input, **self.options)
        budget = self.budget if budget_bytes is None else budget_bytes
        if budget is None:
            assert self.memory_limit is not None
            budget = self.memory_limit.activation_budget_bytes(model)
        call = planner.planned_call(budget, strategy=self.strategy)
        plan = agreed_plan(call.plan, asked_for=(budget if self.memory_limit is None else None, self.strategy))
        return call if plan is call.plan else planner.planned_call_of(plan)

    def call_for_smaller(self, model: nn.Module, sample_input: Any, planned: PlannedCall) -> PlannedCall | None:
        """Captures `model` for a smaller sample and takes over the schedule of `planned`; None if it does not fit."""
        from rockmate.step import capture_step

        options: dict[str, Any] = dict(planned.plan.options)
        try:
            step = capture_step(model, sample_input, **options)
        except PlanMismatchError:  # it has fewer rows than the plan has chunks
            return None
        plan = step.adapted(planned.plan)
        return None if plan is None else step.planned_call(plan)
