"""The plans of one module: which serves a call, and when another is made.

A call is served by the plan in use, by an earlier plan, by the schedule of a larger sample at the
call's sizes, or by a plan that is made now, in this order.

Ownership: `RockmateModule` owns one cache. The cache owns `RunnableCall`s, each of which owns the
code of one plan (`PlannedCall`), the autograd state that runs it (`Runner`) and the watch over the
model that it was made for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rockmate._torch.engine import is_profiling
from rockmate._torch.fsdp import put_shards
from rockmate.budget import size_text
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.opaque_module import opaque_modules
from rockmate.capture.signature import (
    CallSignature,
    SampleCall,
    check_call,
    difference_in_constants,
    differs_in_shapes,
    flatten_bare_call,
    is_no_larger,
    optional_keywords,
    resized_call,
)
from rockmate.capture.traced_forward import ModuleReplacedError
from rockmate.entry.request import PlanRequest
from rockmate.entry.runnable_call import RunnableCall, kin_of
from rockmate.entry.step_family import StepFamily
from rockmate.errors import InfeasibleBudgetError, RockmateError, SignatureMismatchError
from rockmate.planning.options import PlanOptions
from rockmate.planning.step import CapturedStep
from rockmate.runtime.first_backward import OF_OUTPUTS, names_outputs
from rockmate.runtime.model_checks import refuse_uninitialized
from rockmate.runtime.new_plans import NewPlans
from rockmate.runtime.program import PlannedCall
from rockmate.trial.steps import TrialOption, TrialSteps

logger = logging.getLogger(__name__)

Called = tuple[CallSignature, Sequence[Tensor]]
# Plans of one module. A shape or a state that returns within this many finds its plan.
MAX_PLANS = 64
_MOST_FAMILIES = 4  # for what calls read; each may have a symbolic capture


class PlanCache:
    """The plans of one model, the one in use first.

    Attributes:
        runnables: at most `MAX_PLANS`, the one in use first.
        request: how to plan when no plan serves a call; None where only the given plan may run.
        replans: whether a changed module, or a call of other shapes, is planned for.
        new_plans: counts the calls that needed a plan.
        refuses_in_flight: whether a forward that passes the budget together with those in flight,
            where none can be planned for, is an error. Otherwise one line tells of it.
        largest: without a sample, the first call -> the same call at the sizes to plan for first.
    """

    def __init__(
        self,
        model: nn.Module,
        request: PlanRequest | None = None,
        *,
        replans: bool = False,
        trial: TrialOption = "log",
    ) -> None:
        self.runnables: list[RunnableCall] = []
        self.request, self._model, self.replans = request, model, replans
        self.refuses_in_flight = request is None or request.on_infeasible == "error"
        self._has_told_in_flight = self._knows_outputs = False
        self._optional = optional_keywords(model)
        # The first call with each set of keywords, and the bytes that a fractional budget stands
        # for in it; None for a fraction of its own baseline peak.
        self._samples: list[tuple[CallSignature, int | None]] = []
        self.largest: Callable[[CallSignature], CallSignature] | None = None
        self.new_plans = NewPlans()
        self._first: RunnableCall | None = None  # with gradients for outputs beside a loss
        self._before = self.request, self.runnables
        self._excess = Counter[str]()  # what steps take beyond a plan -> the most bytes of it
        self._adapted_trials = TrialSteps(trial)  # of all sizes that take over a schedule

    def plan_for_sample(self, sample: SampleCall) -> None:
        """Plans for a sample, unless the model's first call sets it up.

        Errors as for `PlanRequest.answered`.
        """
        assert self.request is not None
        refuse_uninitialized(self._model)
        try:
            planned, request = self.request.answered(self._model, sample)
            self.adopt(planned)
        except ModuleReplacedError:
            logger.warning("nothing is planned yet, since the first call sets the model up")
            return
        self._samples.append((planned.call, None))
        self.request = request if self.replans else None

    def adopt(
        self, call: PlannedCall, family: StepFamily | None = None, *, is_adapted: bool = False
    ) -> None:
        """Puts a planned call in use."""
        limit_s = (self.request.options if self.request else PlanOptions()).compile_limit_s
        family = family or StepFamily(self._model, call, compile_limit_s=limit_s)
        trials = self._adapted_trials if is_adapted else TrialSteps(self._adapted_trials.option)
        runnable = RunnableCall(
            call, self._model, family, trials, is_adapted=is_adapted, is_first=not self.runnables
        )
        self.runnables.insert(0, runnable)
        if not is_adapted:
            self.new_plans.note_plan(call.plan.baseline_ms)
        if len(self.runnables) > MAX_PLANS:
            # A call that was planned for, not adapted, serves other shapes too, so it goes last.
            adapted = [at for at, each in enumerate(self.runnables) if at and each.is_adapted]
            del self.runnables[adapted[-1] if adapted else MAX_PLANS]

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], casts_to: Any = None) -> Any:
        """The model's output for a training call; errors as for `RockmateModule.forward`.

        The script's backwards run in an autocast that casts to `casts_to`, a dtype, if it is known.
        """
        tensors, call = flatten_bare_call(args, kwargs, self._optional)
        self.new_plans.begin_call()
        runnable = self.runnable_for(call, tensors)
        if self.new_plans.hands_over and self.replans:
            runnable = self._for_outputs(runnable, (call, tensors))
        evidence = None if is_profiling() else runnable.evidence  # beside one nothing is planned
        if evidence is not None and (excess_bytes := evidence.take_excess()):
            runnable = self._with_less(runnable, excess_bytes, (call, tensors))
        if copied_bytes := runnable.take_copied_bytes(tensors):
            what = "inputs or gradients lie in other strides than planned; with copies a step takes"
            called = call, runnable.planned.program.layouts.applied(tensors)  # the plan's strides
            runnable = self._with_less(runnable, copied_bytes, called, what)
            runnable.take_copied_bytes(tensors)  # a new one knows of them
        if beyond := runnable.beyond_budget():
            runnable = self._for_in_flight(runnable, beyond, (call, tensors))
        runnable.planned.program.refuse_casts(casts_to)
        return runnable.run_or_try(tensors, args, kwargs)

    def _for_outputs(self, runnable: RunnableCall, called: Called) -> RunnableCall:
        """The runnable call, with gradients for outputs beside the model's own loss if needed.

        The first step of a script that names those outputs shows whether they get any.
        """
        before = self.request, self.runnables
        if self._first is not None and self._first.graded:
            request, runnables = self._before
            if self._first.graded.isdisjoint(runnables[0].planned.non_differentiable_outputs):
                self.request, self.runnables = request, runnables
                runnable = self.runnable_for(*called)
            self._first, self._before = None, (self.request, self.runnables)
        elif self.request and not self._knows_outputs:
            planned = runnable.planned
            self._knows_outputs = bool(planned.non_differentiable_outputs)
            if self._knows_outputs and names_outputs(planned.output_structure):
                options = replace(self.request.options, differentiable="all")
                request = replace(self.request, options=options)
                with suppress(RockmateError):  # where there is none, a backward says so
                    runnable = self._plan_anew(request, called, OF_OUTPUTS)
                    self._first, self._before = runnable, before
        return runnable

    def _for_in_flight(self, runnable: RunnableCall, beyond: str, called: Called) -> RunnableCall:
        """The runnable call, or one for more forwards in flight; raises if neither may be."""
        number = 1 + len(runnable.others)
        if self.request and self.replans:
            options = replace(self.request.options, in_flight=number)
            runnable = self._plan_anew(replace(self.request, options=options), called, beyond)
            beyond = runnable.beyond_budget()
        msg = (
            f"{beyond}. Pass in_flight={number}, or the most that there are, or run each backward "
            "before the next forward; delete an output that no backward is for (del loss)."
        )
        if beyond and self.refuses_in_flight and not self.new_plans.hands_over:
            raise SignatureMismatchError(msg)
        if beyond and not self._has_told_in_flight:
            self._has_told_in_flight = True
            logger.warning("%s", msg)
        return runnable

    def _with_less(
        self,
        runnable: RunnableCall,
        excess_bytes: int,
        called: Called,
        what: str = "a step has taken",
    ) -> RunnableCall:
        """A runnable call that leaves room for what steps take beyond the plan, if there is one."""
        plan, request = (runnable.planned.larger or runnable.planned).plan, self.request
        asked_bytes = plan.budget_bytes + (request.excess_bytes if request else 0)
        self._excess[what] = max(self._excess[what], excess_bytes)
        excess_bytes = self._excess.total()
        peak_bytes, excess = plan.predicted_peak_bytes + excess_bytes, size_text(excess_bytes)
        if peak_bytes <= asked_bytes:
            return runnable
        told = f"{what} {size_text(peak_bytes)}, {excess} more than predicted"
        advice = f" Give one that is smaller by {excess}."
        can_plan = request and self.replans and not request.is_choice
        if request and can_plan and excess_bytes > request.excess_bytes:
            request, advice = replace(request, excess_bytes=excess_bytes), ""
            try:
                runnable = self._plan_anew(request, called, f"{told}: plans leave room for it")
                if runnable.planned.plan.predicted_peak_bytes + excess_bytes <= asked_bytes:
                    return runnable
                told = f"{told}, and the plan of the smallest peak leaves no room for it"
            except InfeasibleBudgetError as error:
                told = f"{told}, and no plan leaves room for it: {error}"
        logger.warning("%s. The budget is passed.%s", told, advice)
        return runnable

    def _plan_anew(self, request: PlanRequest, called: Called, reason: str) -> RunnableCall:
        """Forgets all plans for one of another request; keeps them where there is none."""
        before = self.request, self.runnables
        self.request, self.runnables = request, []
        try:
            return self._plan(*called, reason=reason)
        except RockmateError:
            self.request, self.runnables = before
            raise

    def empty_for(self, model: nn.Module, *, num_methods: int = 1) -> PlanCache:
        """A cache without a plan, which plans alike."""
        request = self.request and replace(self.request, num_methods=num_methods)
        made = PlanCache(model, request, replans=self.replans, trial=self._adapted_trials.option)
        made.new_plans.hands_over = self.new_plans.hands_over
        return made

    def copy_for(self, model: nn.Module, memo: dict[int, Any]) -> PlanCache | None:
        """A cache for a copy of the model, with the same plan.

        With opaque submodules it has no plan: they belong to the model that was captured. Nor has
        it one where the model has changed. The copy is planned for at its first training call.

        Returns:
            The cache; None in these cases if the plan was given, so that no other is made.
        """
        copied = self.empty_for(model)
        copied._samples = list(self._samples)
        own = [each for each in self.runnables if not each.is_adapted]
        planned = next((each.planned for each in own if not each.difference()), None)
        if planned and not opaque_modules(self._model, planned.plan.options.untraced):
            copied.adopt(
                replace(
                    planned,
                    program=planned.program.of_copy(memo),
                    state=ModelSignature.of(model),
                    attributes=planned.attributes.of_copy(memo),
                )
            )
        elif own and self.request is None:
            return None
        return copied

    def runnable_for(self, call: CallSignature, tensors: Sequence[Tensor]) -> RunnableCall:
        """The runnable call that serves `call`; it is planned for if there is none."""
        if not self.runnables:
            if self.largest is not None:
                self._samples.append((self.largest(call), None))
                self.largest = None
            return self._plan(call, tensors, reason="this is the first training call")
        first = self.runnables[0]
        changed = first.difference(replans=self.replans)
        if changed and put_shards(self._model):
            changed = first.difference(replans=self.replans)
        values = ""  # of those that the forward reads, one that is another now
        if not changed and call == first.planned.call:
            values = first.planned.read_values.difference(self._model, tensors)
            if not values:
                return first
        if not self.replans:
            check_call(first.planned.call, call)
            what = f"the module has changed since it was planned: {changed}" if changed else values
            msg = f"{what}. Change it back, or make a new RockmateModule."
            raise SignatureMismatchError(msg)
        if changed:
            for runner in (vars(each).get("runner") for each in self.runnables):
                if runner is not None:  # else it has not run, and its tensors may be gone
                    runner.owners.release()
        current = [each for each in self.runnables if not each.difference()]
        for runnable in current:
            if call == runnable.planned.call:
                values = runnable.planned.read_values.difference(self._model, tensors)
                if values:
                    continue
                self.runnables.remove(runnable)
                self.runnables.insert(0, runnable)
                return runnable
        alike = [each for each in current if differs_in_shapes(each.planned.call, call)]
        same = [each for each in current if call == each.planned.call]  # for other values
        if alike or len(same) > 1:  # two such plans: symbols for the values may be worth it
            return self._plan_for_shapes([*alike, *same], call, tensors)
        reason, is_value = changed or values, True
        if not reason:
            reason, is_value = self._difference_in(call)
        self.new_plans.add(reason, is_value=is_value)
        return self._plan(call, tensors, reason=reason)

    def _difference_in(self, call: CallSignature) -> tuple[str, bool]:
        """How a call differs from the samples, in words, and whether in a constant."""
        known = [sample for sample, _ in self._samples]
        if any(call.kind == sample.kind for sample in known):
            return "requires_grad of an input has changed", False
        alike = next((sample for sample in known if call.keywords == sample.keywords), known[0])
        ours, theirs = alike.part_in(call), call.part_in(alike)
        if ours.structure != theirs.structure:
            return difference_in_constants(ours, theirs), True
        if ours.kind != theirs.kind:
            return "its tensors are of another dtype, device or class than the sample's", False
        return "the call has other keywords than the sample", False

    def _plan_for_shapes(
        self, alike: Sequence[RunnableCall], call: CallSignature, tensors: Sequence[Tensor]
    ) -> RunnableCall:
        """Reuses the schedule of a larger call if there is one, else plans within its bytes.

        A call with other dims of size 1 begins a family: one capture serves the calls like it.
        """
        kin = kin_of(alike, call)
        known = kin or alike[:1]
        reads = any(each.planned.read_values.read for each in known)
        reason = "it reads other values" if reads else "tensors have other sizes"
        families = dict.fromkeys(each.family for each in reversed(known))  # the first one first
        serving = (each for each in families if len(families) == 1 or each.serves(call, tensors))
        family = next(serving, known[-1].family)
        larger = [
            each.planned
            for each in known
            if each.family is family
            and is_no_larger(call, each.planned.call)
            and family.has_kernels_alike(call, each.planned.call)
        ]
        adapted = family.resized(larger[-1], call, tensors) if larger and kin else None
        if adapted is None:
            num_before = family.num_separate
            step = family.step(tensors, call)
            if family.num_separate > num_before:
                self.new_plans.add(reason, is_value=reads)
                if reads and len(families) < _MOST_FAMILIES:
                    kin = []
            shaped = step.with_chunks_of(larger[-1].plan.options) if larger else step
            plan = shaped.adapted(larger[-1].plan) if larger else None
            if plan is None:
                if any(call == each.planned.call for each in alike):
                    self.new_plans.add(reason, is_value=reads)
                # A plan whose budget was infeasible has more bytes. Adapted plans have the budget
                # of the plan that they come from, and are made only where they are read.
                planned_for = [each for each in alike if not each.is_adapted] or known
                budget_bytes = min(each.planned.plan.budget_bytes for each in planned_for)
                return self._plan_within(step, family if kin else None, budget_bytes)
            adapted = shaped.planned_call(plan)
        self.adopt(adapted, family if kin else None, is_adapted=True)
        logger.debug("the schedule of the sample serves smaller tensors: %s", call)
        return self.runnables[0]

    def _plan_within(
        self, step: CapturedStep, family: StepFamily | None, budget_bytes: int
    ) -> RunnableCall:
        """Plans for a step of other sizes within the bytes of the sample's budget."""
        assert self.request is not None
        try:
            planned = self.request.planned_call_for_step(step, budget_bytes)
        except InfeasibleBudgetError as error:
            advice = (
                "The budget is that of the sample, whose tensors have other shapes than this "
                "call's. Give the largest batch as the sample. Without a sample, the first "
                "training batch is the sample."
            )
            raise error.advised(advice) from None
        self.adopt(planned, family)
        self._log_plan("its tensors have other shapes than the sample's")
        return self.runnables[0]

    def _plan(self, call: CallSignature, tensors: Sequence[Tensor], *, reason: str) -> RunnableCall:
        """Plans at the sizes of the sample with the call's keywords, then for the call.

        A fractional budget is thereby one of the sample's peak, whatever the size of the call.
        """
        assert self.request is not None
        known = next((each for each in self._samples if each[0].has_form_of(call)), None)
        sample, share_bytes = known or (call, self._share_bytes(call))
        sized = resized_call(tensors, call, sample)
        planned, self.request = self.request.answered(self._model, sized, share_bytes)
        if known is None:
            self._samples.append((sample, share_bytes))
        self.adopt(planned)
        self._log_plan(reason)
        if planned.call == call:
            return self.runnables[0]
        return self._plan_for_shapes(self.runnables[:1], call, tensors)

    def _share_bytes(self, call: CallSignature) -> int | None:
        """Bytes that a fraction stands for in a call with other keywords.

        None if the call is as large as a sample: the fraction is then one of its own peak.
        """
        pairs = [(each.part_in(call), call.part_in(each)) for each, _ in self._samples]
        is_sample_sized = any(
            mine.tensors and mine.ranks == theirs.ranks and is_no_larger(mine, theirs)
            for mine, theirs in pairs
        )
        if not self.runnables or is_sample_sized:
            return None
        current = [each for each in self.runnables if not each.difference()]
        return (current or self.runnables)[0].planned.plan.budget_bytes

    def _log_plan(self, reason: str) -> None:
        plan = self.runnables[0].planned.plan
        logger.warning(
            "planned for this call, since %s: predicted peak %s within %s, "
            "%.3fx of the time without recomputation",
            reason,
            size_text(plan.predicted_peak_bytes),
            size_text(plan.budget_bytes),
            plan.predicted_ratio,
        )
