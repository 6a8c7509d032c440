"""Planner: a planning session whose plans become modules."""

from __future__ import annotations

from rockmate.budget import Budget
from rockmate.module import RockmateModule
from rockmate.plan.plan import Plan
from rockmate.planning.session import PlanningSession


class Planner(PlanningSession):
    """Captures and measures a model once, then plans for any number of budgets.

    Attributes:
        timings: seconds spent in "capture", "costs" and "solve"; planning for one more budget is not among them.
        allow_chunking: as given.
        baseline_peak_bytes: the activation peak with nothing recomputed.
        baseline_ms: time of one forward and backward with nothing recomputed.
        minimum_peak_bytes: the smallest budget for which there is a plan whatever the ops are measured to take: without chunks, unless
            they are allowed wherever they are faster. Plans in chunks meet smaller ones; `InfeasibleBudgetError.minimum_bytes` tells the
            smallest of all.
    """

    def module(self, budget: Budget, *, strategy: str = "rockmate") -> RockmateModule:
        """A module that trains within `budget`; see `plan`. It refuses calls of other shapes, which `RockmateModule` itself plans for."""
        return RockmateModule.of(self._step.model, self.planned_call(budget, strategy=strategy))

    def module_of(self, plan: Plan) -> RockmateModule:
        """A module that runs a plan of this planner, or that another made for the same step; `PlanMismatchError` if it was another."""
        self._step.check_present()
        return RockmateModule.of(self._step.model, self.planned_call_of(plan))
