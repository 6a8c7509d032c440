"""What the user asked for, kept so that planning can be repeated.

A request is made once, by `RockmateModule`. It is used when the first batch arrives, and again
when the module or the shapes of its calls have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from rockmate._util import begin_stage, gc_paused, stages_shown
from rockmate.budget import Budget, OnInfeasible, is_share, parse_budget, size_text, slowdown_of
from rockmate.capture.compiled_model import plain_model
from rockmate.capture.signature import SampleCall
from rockmate.errors import InfeasibleBudgetError, InfeasibleMemoryLimitError
from rockmate.memory_limit import MemoryLimit
from rockmate.offload.weight_home import homes_of
from rockmate.plan.plan import Plan
from rockmate.planning.options import AT_HOME, PlanOptions
from rockmate.planning.simulated_capture import captured_step
from rockmate.planning.step import CapturedStep, capture_step, checked_step
from rockmate.planning.stored_plans import StoredPlan, may_store
from rockmate.runtime.pending_steps import pending_steps_of
from rockmate.runtime.plan_agreement import broadcast_plan
from rockmate.runtime.program import PlannedCall

if TYPE_CHECKING:
    from rockmate.planning.session import PlanningSession

_DEFAULTS = PlanOptions()
_NEAR = 0.9  # of what a limit leaves: a stored plan for less is not taken


def planned_call_of(plan: Plan, model: nn.Module, sample: SampleCall) -> PlannedCall:
    """A plan that was made before, with the code that runs it; nothing is timed or solved.

    Raises:
        PlanMismatchError: the plan was made for another model or sample.
    """
    step = checked_step(lambda: capture_step(model, sample, plan.options))
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
        excess_bytes: that steps were measured to take beyond their plans, which leave room for it.
    """

    budget: Budget | None = None
    memory_limit: MemoryLimit | None = None
    strategy: str = "rockmate"
    on_infeasible: OnInfeasible = "error"
    options: PlanOptions = _DEFAULTS
    num_methods: int = 1
    excess_bytes: int = 0

    @property
    def is_choice(self) -> bool:
        """Whether the budget is chosen from the curve of time against memory."""
        return slowdown_of(self.budget) is not None

    @property
    def left_out_by_frames(self) -> list[str]:
        """Names of the options that frames do not keep."""
        names = ("marks", "policy", "in_flight", "weights")
        return [name for name in names if name in self.options.changed]

    def answered(
        self, model: nn.Module, sample: SampleCall, share_bytes: int | None = None
    ) -> tuple[PlannedCall, PlanRequest]:
        """Captures, measures and plans; gives the request that was met, too.

        Where a memory limit has no plan, frozen weights may be at home, if nothing else is said.

        Args:
            model: the model.
            sample: a call of it.
            share_bytes: bytes that a fractional budget stands for; None for a fraction of this
                sample's own baseline peak.

        Raises:
            RockmateError: as for `Planner`, `Planner.plan` and
                `MemoryLimit.activation_budget_bytes`.
        """
        try:
            return self._planned_call(model, sample, share_bytes), self
        except (InfeasibleBudgetError, InfeasibleMemoryLimitError) as error:
            if self.memory_limit is None:
                raise
            options = self.options.with_homes(plain_model(model), error)
        request = replace(self, options=options)
        return request._planned_call(model, sample, share_bytes), request

    @stages_shown()
    def _planned_call(
        self, model: nn.Module, sample: SampleCall, share_bytes: int | None
    ) -> PlannedCall:
        budget = self._budget(share_bytes)
        capture = partial(captured_step, plain_model(model), sample, self.options)
        captured, stored = list[CapturedStep](), None
        if may_store(self.options):
            with gc_paused():
                begin_stage("capturing the model")
                captured.append(capture())
                stored = StoredPlan.of(captured[0], self._asked(budget), self.options)
                if (call := self._stored_call(stored, model, budget)) is not None:
                    return call
        from rockmate.planning.session import PlanningSession  # loads the solvers

        session = PlanningSession.capturing(model, capture, self.options, captured)
        if budget is None or share_bytes is None:
            budget = self._left(session, model, budget)
        return self._session_call(session, budget, stored)

    def planned_call_for_step(self, step: CapturedStep, budget_bytes: int) -> PlannedCall:
        """Measures and plans a captured step of other sizes; errors as for `Planner.plan`.

        The budget is in bytes: a fraction of the step's own peak would be another number of bytes
        than for the sample. Where it bounds weights, too, it is the whole bound, of which a plan
        has what its weights leave.
        """
        is_whole = self.options.weights in AT_HOME
        budget = self._budget(None) if is_whole else budget_bytes
        stored = StoredPlan.of(step, self._asked(budget), self.options)
        if (call := self._stored_call(stored, step.model, budget)) is not None:
            return call
        from rockmate.planning.session import PlanningSession  # loads the solvers

        session = PlanningSession.of(step, self.options)
        left = self._left(session, step.model, budget) if is_whole else budget_bytes
        return self._session_call(session, left, stored)

    def _left(self, session: PlanningSession, model: nn.Module, budget: Budget | None) -> Budget:
        """The budget of a plan, without the room for what steps take beyond theirs."""
        if budget is not None:
            if not self.excess_bytes or self.is_choice:
                return budget
            return max(1, parse_budget(budget, session.baseline_peak_bytes) - self.excess_bytes)
        # The process holds more memory once it has planned.
        if session.weights is not None:  # what is left is left to activations and to weights
            plain = plain_model(model)
            if not pending_steps_of(plain).runners_of(plain):
                homes_of(plain).hold(session.weights.named, self.options.moves)
        self._call_within(session, self._room(model))
        return self._room(model)

    def _budget(self, share_bytes: int | None) -> Budget | None:
        """The activation budget of one method; None where that is what a limit leaves."""
        if is_share(self.budget) or self.is_choice:
            return self.budget if share_bytes is None else share_bytes
        return None if self.budget is None else parse_budget(self.budget, 0) // self.num_methods

    def _room(self, model: nn.Module) -> int:
        """What the limit leaves now to one method."""
        assert self.memory_limit is not None
        room_bytes = self.memory_limit.activation_budget_bytes(model, self.options.weights)
        room_bytes //= self.num_methods
        return max(1, room_bytes - self.excess_bytes)

    def _asked(self, budget: Budget | None) -> tuple[Any, ...]:
        """What a plan is made for beside the step and the options of planning."""
        limit = self.memory_limit
        bound = (limit.limit_bytes, self.num_methods) if limit and budget is None else budget
        return bound, self.strategy, self.on_infeasible, self.excess_bytes

    def _stored_call(
        self, stored: StoredPlan | None, model: nn.Module, budget: Budget | None
    ) -> PlannedCall | None:
        """The code of the stored plan, if there is one that fits the bound as of now."""

        def fits(plan: Plan) -> bool:
            room = self._room(model) if budget is None else _bytes_of(budget, plan)
            is_near = plan.budget_bytes >= _NEAR * room or plan.predicted_ratio <= 1
            return plan.predicted_peak_bytes <= room and (budget is not None or is_near)

        if stored is None or (call := stored.read(fits)) is None:
            return None
        return self._agreed(call, stored.text, stored.call_of, budget)

    def _session_call(
        self, session: PlanningSession, budget: Budget, stored: StoredPlan | None
    ) -> PlannedCall:
        call = self._call_within(session, budget)
        call = self._agreed(call, session.step_text, session.planned_call_of, budget)
        is_within = call.plan.predicted_peak_bytes <= _bytes_of(budget, call.plan)
        if stored is not None and session.step_text == stored.text and is_within:
            stored.write(call.plan)
        return call

    def _agreed(
        self,
        call: PlannedCall,
        step_text: str,
        call_of: Callable[[Plan], PlannedCall],
        budget: Budget | None,
    ) -> PlannedCall:
        """The call of the plan that all ranks of a process group run: the first one's."""
        asked_for = budget if self.memory_limit is None else None
        request = (asked_for, self.strategy, self.options.machine)
        plan = broadcast_plan(call.plan, step=step_text, request=request)
        return call if plan is call.plan else call_of(plan)

    def _call_within(self, session: PlanningSession, budget: Budget) -> PlannedCall:
        try:
            return session.planned_call(
                budget, strategy=self.strategy, on_infeasible=self.on_infeasible
            )
        except InfeasibleBudgetError as error:
            num_methods = 1 if is_share(self.budget) else self.num_methods
            whole = error.of_whole(num_methods, self.excess_bytes)
            if num_methods > 1:
                whole.advised(
                    f"Each of the {num_methods} methods that are planned has an equal part of it."
                )
            if self.excess_bytes:
                excess = size_text(self.excess_bytes)
                whole.advised(f"Steps took {excess} beyond their plans, for which room is left.")
            raise whole from None


def _bytes_of(budget: Budget, plan: Plan) -> int:
    """A budget in bytes; one that was chosen from the curve is that of the plan."""
    is_choice = slowdown_of(budget) is not None
    return plan.budget_bytes if is_choice else parse_budget(budget, plan.baseline_peak_bytes)
