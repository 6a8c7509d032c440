"""How to plan, kept so that it can be done again: when the first batch is there, and when the module has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from rockmate.agreement import agreed_plan
from rockmate.budget import Budget
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

    def planned_call(self, model: nn.Module, sample_input: Any) -> PlannedCall:
        """Captures, measures and plans; errors as for `Planner` and `Planner.plan`, and of `MemoryLimit.activation_budget_bytes`."""
        from rockmate.planner import Planner

        planner = Planner(model, sample_input, **self.options)
        budget = self.budget
        if budget is None:
            assert self.memory_limit is not None
            budget = self.memory_limit.activation_budget_bytes(model)
        call = planner.planned_call(budget, strategy=self.strategy)
        plan = agreed_plan(call.plan, asked_for=(self.budget, self.strategy))
        return call if plan is call.plan else planner.planned_call_of(plan)
