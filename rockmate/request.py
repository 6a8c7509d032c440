"""How to plan, kept so that it can be done again: when the first batch is there, and when the module has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from rockmate.budget import Budget, is_share
from rockmate.memory_limit import MemoryLimit
from rockmate.runtime.plan_agreement import broadcast_plan

if TYPE_CHECKING:
    from rockmate.planner import Planner
    from rockmate.runtime.planned_call import PlannedCall
    from rockmate.step import CapturedStep


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

    def planned_call(
        self, model: nn.Module, sample_input: Any, *, share_bytes: int | None = None
    ) -> PlannedCall:
        """Captures, measures and plans; errors as for `Planner` and `Planner.plan`, and of `MemoryLimit.activation_budget_bytes`.

        Args:
            model: the model.
            sample_input: as for `Planner`.
            share_bytes: what a budget that is a share stands for; None if it is one of this sample's own peak.
        """
        from rockmate.planner import Planner

        planner = Planner(model, sample_input, **self.options)
        budget = share_bytes if share_bytes is not None and is_share(self.budget) else self.budget
        if budget is None:
            assert self.memory_limit is not None
            planner.plan(self.memory_limit.activation_budget_bytes(model), strategy=self.strategy)
            budget = self.memory_limit.activation_budget_bytes(
                model
            )  # a process holds more once it has planned
        return self._broadcast_call(
            planner, budget, asked_for=budget if self.memory_limit is None else None
        )

    def planned_call_for_step(self, step: CapturedStep, budget_bytes: int) -> PlannedCall:
        """Measures and plans for a step of other sizes, within a number of bytes; errors as for `Planner.plan`.

        A share of the step's own peak would be another number of bytes than for the sample.
        """
        from rockmate.planner import Planner

        settings = {
            name: value
            for name, value in self.options.items()
            if name not in {*step.options, "untraced"}
        }
        asked_for = budget_bytes if self.memory_limit is None else None
        return self._broadcast_call(Planner.of(step, **settings), budget_bytes, asked_for=asked_for)

    def _broadcast_call(
        self, planner: Planner, budget: Budget, *, asked_for: Budget | None
    ) -> PlannedCall:
        """The call that all ranks of a data-parallel group plan alike."""
        call = planner.planned_call(budget, strategy=self.strategy)
        plan = broadcast_plan(call.plan, asked_for=(asked_for, self.strategy))
        return call if plan is call.plan else planner.planned_call_of(plan)
