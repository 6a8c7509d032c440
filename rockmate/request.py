"""What the user asked for, kept so that planning can be repeated.

A request is made once, by `RockmateModule`. It is used when the first batch arrives, and again
when the module or the shapes of its calls have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from rockmate.budget import Budget, OnInfeasible, is_share, parse_budget
from rockmate.capture.traced_forward import first_call_awaited
from rockmate.errors import InfeasibleBudgetError
from rockmate.memory_limit import MemoryLimit
from rockmate.plan.plan import Plan
from rockmate.planning.options import PlanOptions
from rockmate.runtime.plan_agreement import broadcast_plan
from rockmate.runtime.planned_call import PlannedCall
from rockmate.step import CapturedStep, capture_step, checked_step

if TYPE_CHECKING:
    from rockmate.planning.session import PlanningSession

_DEFAULTS = PlanOptions()


def planned_call_of(plan: Plan, model: nn.Module, sample_input: Any) -> PlannedCall:
    """A plan that was made before, with the code that runs it; nothing is timed or solved.

    Raises:
        PlanMismatchError: the plan was made for another model or sample.
    """
    step = checked_step(lambda: capture_step(model, sample_input, plan.options))
    return step.planned_call(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The bound and the options that the user gave.

    Attributes:
        budget: the activation budget; None where `memory_limit` bounds the whole device.
        memory_limit: the bound on the whole device.
        strategy: the planning strategy; see `Planner.plan`.
        on_infeasible: "least" plans the smallest peak where no schedule fits.
        options: of planning.
        num_methods: how many methods of a model share the bytes of the bound in equal parts. A
            fraction is one of the peak of each.
    """

    budget: Budget | None = None
    memory_limit: MemoryLimit | None = None
    strategy: str = "rockmate"
    on_infeasible: OnInfeasible = "error"
    options: PlanOptions = _DEFAULTS
    num_methods: int = 1

    @property
    def left_out_by_frames(self) -> list[str]:
        """Names of the options that frames do not keep."""
        return [name for name in ("marks", "policy", "in_flight") if name in self.options.changed]

    def planned_call(
        self, model: nn.Module, sample_input: Any, *, share_bytes: int | None = None
    ) -> PlannedCall:
        """Captures, measures and plans.

        Args:
            model: the model.
            sample_input: as for `Planner`.
            share_bytes: bytes that a fractional budget stands for; None for a fraction of this
                sample's own baseline peak.

        Raises:
            RockmateError: as for `Planner`, `Planner.plan` and
                `MemoryLimit.activation_budget_bytes`.
        """
        from rockmate.planning.session import PlanningSession  # loads the solvers

        with first_call_awaited():
            session = PlanningSession(model, sample_input, self.options)
        if is_share(self.budget):
            budget = self.budget if share_bytes is None else share_bytes
        elif self.budget is not None:
            budget = parse_budget(self.budget, 0) // self.num_methods
        else:
            assert self.memory_limit is not None
            bound = self.memory_limit.activation_budget_bytes
            self._call_within(session, bound(model) // self.num_methods)
            # The process holds more memory once it has planned.
            budget = bound(model) // self.num_methods
        assert budget is not None
        return self._broadcast_call(
            session, budget, asked_for=budget if self.memory_limit is None else None
        )

    def planned_call_for_step(self, step: CapturedStep, budget_bytes: int) -> PlannedCall:
        """Measures and plans a captured step of other sizes; errors as for `Planner.plan`.

        The budget is in bytes: a fraction of the step's own peak would be another number of bytes
        than for the sample.
        """
        from rockmate.planning.session import PlanningSession  # loads the solvers

        asked_for = budget_bytes if self.memory_limit is None else None
        session = PlanningSession.of(step, self.options)
        return self._broadcast_call(session, budget_bytes, asked_for=asked_for)

    def _broadcast_call(
        self, session: PlanningSession, budget: Budget, *, asked_for: Budget | None
    ) -> PlannedCall:
        """The planned call; all ranks of a process group run the plan of the first."""
        call = self._call_within(session, budget)
        request = (asked_for, self.strategy, self.options.machine)
        plan = broadcast_plan(call.plan, step=session.step_text, request=request)
        return call if plan is call.plan else session.planned_call_of(plan)

    def _call_within(self, session: PlanningSession, budget: Budget) -> PlannedCall:
        try:
            return session.planned_call(
                budget, strategy=self.strategy, on_infeasible=self.on_infeasible
            )
        except InfeasibleBudgetError as error:
            if self.num_methods == 1 or is_share(self.budget):
                raise
            sizes = error.budget_bytes, error.minimum_bytes
            whole = InfeasibleBudgetError(*(self.num_methods * each for each in sizes))
            raise whole.advised(
                f"Each of the {self.num_methods} methods that are planned has an equal part of it."
            ) from None
