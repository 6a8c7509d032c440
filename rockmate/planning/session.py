"""A planning session: a step captured once, its costs, and plans for any number of budgets.

capture_step -> costs -> chunk forms -> search -> Plan. A session knows no `RockmateModule`. It
returns plans as data (`Plan`) and with the code that runs them (`PlannedCall`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Self

from torch import nn

from rockmate._util import gc_paused
from rockmate.budget import (
    Budget,
    OnInfeasible,
    budgets_in_bytes,
    check_on_infeasible,
    parse_budget,
    parse_budgets,
    size_text,
    slowdown_of,
)
from rockmate.capture.compiled_model import plain_model
from rockmate.capture.options import Numerics
from rockmate.capture.signature import SampleCall
from rockmate.costs.machine import Machine, load_machine
from rockmate.errors import InfeasibleBudgetError, InvalidBudgetError
from rockmate.fusion.report import FusionReport
from rockmate.plan.faults import broken_mark
from rockmate.plan.plan import Plan
from rockmate.planning.candidate import Candidate
from rockmate.planning.checked_forms import (
    FurtherForms,
    advise_format,
    checked_forms,
    costs_from,
    fused_forms,
    timed,
)
from rockmate.planning.curve_choice import least_within, recommended
from rockmate.planning.form import Form, advice_on_marks
from rockmate.planning.forms import Forms
from rockmate.planning.options import PlanOptions
from rockmate.planning.search_problem import StoppingRule
from rockmate.planning.search_trace import gap_bar
from rockmate.planning.simulated_capture import captured_step, machine_of
from rockmate.planning.step import CapturedStep
from rockmate.planning.strategies import DEFAULT, UNMOVED
from rockmate.runtime.program import PlannedCall

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The peak and time of the plan for one budget.

    Attributes:
        budget_bytes: the budget.
        predicted_peak_bytes: the peak of its plan, at most the budget.
        predicted_ms: the time of one forward and backward, in milliseconds.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_ms: float


class PlanningSession:
    """Captures and measures a model once, then plans for any number of budgets.

    Arguments, attributes and errors are those of `Planner`, which adds the modules that run the
    plans.
    """

    options: PlanOptions
    timings: dict[str, float]
    numerics: Numerics
    fusion: FusionReport | None
    baseline_peak_bytes: int
    baseline_ms: float

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        options: PlanOptions | None = None,
        **keywords: Any,
    ) -> None:
        options = PlanOptions.of(options, keywords)
        sample = SampleCall.of(sample_input)
        self._capture(model, partial(captured_step, plain_model(model), sample, options), options)

    @classmethod
    def capturing(
        cls,
        model: nn.Module,
        capture: Callable[[], CapturedStep],
        options: PlanOptions,
        captured: Sequence[CapturedStep] = (),
    ) -> Self:
        """A session for the steps that `capture` gives; `captured` may have the first of them."""
        session, first = cls.__new__(cls), [*captured]
        session._capture(model, lambda: first.pop() if first else capture(), options)
        return session

    def _capture(
        self, model: nn.Module, capture: Callable[[], CapturedStep], options: PlanOptions
    ) -> None:
        fused = partial(fused_forms, options=options) if options.kernels == "auto" else None
        self._begin(model, capture, options, machine_of(options), fused)
        if options.kernels != "eager":
            advise_format(self._step)

    @classmethod
    def of(cls, step: CapturedStep, options: PlanOptions | None = None, **keywords: Any) -> Self:
        """A session for a captured step; arguments and errors as for the class.

        Options of the capture do not count.
        """
        options = PlanOptions.of(options, keywords)
        machine = None if options.machine is None else load_machine(options.machine)
        session = cls.__new__(cls)
        session._begin(step.model, lambda: step, options, machine)
        return session

    def _begin(
        self,
        model: nn.Module,
        capture: Callable[[], CapturedStep],
        options: PlanOptions,
        machine: Machine | None,
        further: FurtherForms | None = None,
    ) -> None:
        """Finds the costs and the smallest peak of a step; `further` makes other forms."""
        self.model, self.options, self._machine = model, options, machine
        self.timings, self.numerics = dict[str, float](), options.numerics
        self._rule = StoppingRule(options.gap_tolerance, options.time_limit_s)
        self._plans: dict[tuple[int, str], Plan] = {}
        # What the smallest peak would be without each of the marks; empty if there are none.
        self._mark_advice = cache(
            lambda strategy: advice_on_marks(
                self._forms.captured, strategy, self._rule.time_limit_s
            )
        )
        self._offload = options.moves
        costs_of = costs_from(machine, self._offload, progress=options.progress)

        def form_of(step: CapturedStep) -> Form:
            return Form(step, costs_of(step.graph), self._rule)

        forms = checked_forms(capture, further, form_of, self.timings)
        steps = [each.step for each in forms]
        self._step = steps[0]
        fusions = [each.fusion for each in steps if each.fusion is not None]
        self.fusion = fusions[0].report if fusions else None
        self._forms = Forms(
            forms, form_of, numerics=self.numerics, rule=self._rule, request=self._offload,
            weights=options.weights,
        )  # fmt: skip
        self.weights = self._forms.weights
        with timed(self.timings, "solve"):
            self._forms.minimum("rockmate")
        baseline = self._forms.captured.baseline
        self.baseline_peak_bytes = baseline.peak_bytes
        self.baseline_ms = baseline.time_ms

    @property
    def step_text(self) -> str:
        """Tells the step and its options, before a plan chooses kernels or chunks.

        It is the same on all ranks that plan for the same step, whatever times they measure.
        """
        return self._step.text

    @cached_property
    def minimum_peak_bytes(self) -> int:
        """See `Planner`."""
        return self.minimum_peak()

    def plan(
        self, budget: Budget, *, strategy: str = "rockmate", on_infeasible: OnInfeasible = "error"
    ) -> Plan:
        """The fastest plan found within a budget, without another capture or measurement.

        Args:
            budget: bytes, a size ("6GiB", "800MB"), or a fraction in (0, 1] of
                `baseline_peak_bytes`. "knee" takes the budget where the curve of time against
                memory bends (without a bend "1.05x"), and "1.05x" the smallest one whose step takes
                at most so much of the time without recomputation; see `curve_budgets`.
            strategy: one of `rockmate.STRATEGIES`. "none" recomputes nothing. "chen" saves the
                boundary of every sqrt(n)-th block (Chen et al. 2016). "rotor" is Rotor's dynamic
                program without options. "checkmate" solves the whole graph as one program, for
                small models. "recompute" is the default without moves, "bitwise" without moves and
                chunks. All are to compare with.
            on_infeasible: "least" plans the smallest peak found where no schedule fits, with one
                line in the log. The plan's `budget_bytes` is then that peak.

        Raises:
            InvalidBudgetError: the budget cannot be read.
            InfeasibleBudgetError: no schedule fits; the error carries the smallest peak.
            SolverLimitError: "checkmate" found no schedule in its time.
            InvalidArgumentError: the strategy is unknown, or `on_infeasible` is not one of its
                values.
        """
        check_on_infeasible(on_infeasible)
        self._forms.check_budget(budget)
        slowdown = slowdown_of(budget)
        if slowdown is not None:
            return self._chosen(slowdown, strategy)
        budget_bytes = parse_budget(budget, self.baseline_peak_bytes)
        if strategy == UNMOVED and self._offload is None:
            strategy = "rockmate"
        plan = self._plan_within(budget_bytes, strategy)
        if plan is not None:
            return plan
        minimum_bytes, smallest = self._smallest(strategy)
        if on_infeasible == "error":
            error = InfeasibleBudgetError(
                budget_bytes,
                minimum_bytes,
                where=smallest.peak_place(),
                slowdown=smallest.predicted_ratio,
            )
            with gc_paused():
                advice = self._mark_advice(strategy)
            raise error.advised(advice) if advice else error
        logger.warning(
            "no schedule fits the budget of %s, so the plan takes the smallest peak found, %s, "
            "which is set by %s; the activation peak without recomputation is %s, and the plan "
            "takes %.2fx of its time",
            size_text(budget_bytes),
            size_text(minimum_bytes),
            smallest.peak_place(),
            size_text(self.baseline_peak_bytes),
            smallest.predicted_ratio,
        )
        return smallest

    def curve_budgets(self, strategies: Iterable[str] = (DEFAULT,)) -> list[int]:
        """The smallest feasible budget without chunks, and each tenth of the baseline's peak above.

        Args:
            strategies: one of which is to have a plan within the smallest.
        """
        smallest = min(map(self.minimum_peak, strategies))
        tenths = budgets_in_bytes([tenth / 10 for tenth in range(1, 11)], self.baseline_peak_bytes)
        return [smallest, *(budget for budget in tenths if budget > smallest)]

    def _chosen(self, slowdown: float, strategy: str) -> Plan:
        """The plan at the knee of the curve, or with a slowdown above 0 the least within it."""
        if strategy != DEFAULT:
            msg = f"strategy {strategy!r} has no curve to choose from. Give a budget as a size."
            raise InvalidBudgetError(msg)
        plans = [*self.plans(self.curve_budgets(), progress=self.options.progress).values()]
        points = [(plan.predicted_peak_bytes, plan.predicted_ratio) for plan in plans]
        place = least_within(points, slowdown) if slowdown else recommended(points)
        chosen = plans[-1 if place is None else place]  # nothing recomputed, up to rounding
        logger.info(
            "the budget is %s, %.2f of the peak without recomputation, at %.3fx of its time",
            size_text(chosen.budget_bytes),
            chosen.budget_bytes / self.baseline_peak_bytes,
            chosen.predicted_ratio,
        )
        return chosen

    def _plan_within(self, budget_bytes: int, strategy: str) -> Plan | None:
        if (budget_bytes, strategy) not in self._plans:
            with gc_paused():
                self._rule.begin()
                with gap_bar(is_shown=self.options.progress):
                    best = self._forms.best_within(budget_bytes, strategy)
                if best is None:
                    return None
                self._keep({budget_bytes: self._as_plan(budget_bytes, strategy, *best)}, strategy)
        return self._plans[budget_bytes, strategy]

    def _smallest(self, strategy: str) -> tuple[int, Plan]:
        """The smallest budget with a plan, and that; one in chunks may not be met again."""
        least_bytes = self._forms.min_peak(strategy).peak_bytes
        smallest = self._plan_within(least_bytes, strategy)
        if smallest is None:
            least_bytes = self.minimum_peak(strategy)
            smallest = self.plan(least_bytes, strategy=strategy)
        return least_bytes, smallest

    def _keep(self, plans: Mapping[int, Plan], strategy: str) -> None:
        """Takes plans of a strategy that are faster than the known ones for their budgets.

        None of those that are kept is slower than one for a smaller budget.
        """
        if self.weights is not None:  # whose plans have budgets of their own
            self._plans |= {(budget, strategy): plan for budget, plan in plans.items()}
            return
        known = {budget: plan for (budget, each), plan in self._plans.items() if each == strategy}
        news = {
            budget: plan
            for budget, plan in plans.items()
            if budget not in known or plan.predicted_ms < known[budget].predicted_ms
        }
        found = never_slower(known | news)
        self._plans |= {(budget, strategy): plan for budget, plan in found.items()}

    def plans(self, budgets: Iterable[Budget] | str, *, progress: bool = False) -> dict[int, Plan]:
        """Plans of the default strategy for many budgets, by budget in bytes.

        They are planned together: each begins with the plan of the next larger budget, too. A
        larger budget never takes longer: it gets the plan of a smaller one where that is faster. So
        it is with `plan`, which returns these plans from then on. Infeasible budgets are left out.

        Args:
            budgets: each as for `plan`, or a range as text: "0.2:1.0:50".
            progress: shows a progress bar.

        Raises:
            InvalidBudgetError: a budget cannot be read.
        """
        listed = parse_budgets(budgets)
        for each in listed:
            self._forms.check_budget(each)
        wanted = sorted({parse_budget(each, self.baseline_peak_bytes) for each in listed})
        with gc_paused():
            self._rule.begin(max(1, len(wanted)))
            found = self._forms.best_within_each(wanted, progress=progress)
            plans = {
                budget_bytes: self._as_plan(budget_bytes, "rockmate", *best)
                for budget_bytes, best in found.items()
            }
        plans = plans if self.weights is not None else never_slower(plans)
        self._keep(plans, "rockmate")
        return plans

    def planned_call(
        self, budget: Budget, *, strategy: str = "rockmate", on_infeasible: OnInfeasible = "error"
    ) -> PlannedCall:
        """A plan with the code that runs it; arguments and errors as for `plan`."""
        self._step.check_present()
        return self.planned_call_of(
            self.plan(budget, strategy=strategy, on_infeasible=on_infeasible)
        )

    def planned_call_of(self, plan: Plan) -> PlannedCall:
        """A plan that any session made for the same step, with the code that runs it.

        Raises:
            PlanMismatchError: the plan was made for another step.
        """
        return self._forms.step_for(plan.options).planned_call(plan)

    def frontier(self, *, strategy: str = "rockmate") -> tuple[FrontierPoint, ...]:
        """The least time found for budgets from the smallest peak to the baseline's.

        Budgets grow and times fall from point to point. `plan` gives the same time at each point's
        budget.
        """
        with gc_paused():
            points = self._forms.frontier(strategy)
        return tuple(
            FrontierPoint(
                budget_bytes=budget_bytes,
                predicted_peak_bytes=candidate.peak_bytes,
                predicted_ms=candidate.time_ms,
            )
            for budget_bytes, candidate in points
        )

    def minimum_peak(self, strategy: str = "rockmate") -> int:
        """The smallest budget, in bytes, for which a strategy always has a plan.

        It refers to plans without chunks.
        """
        return self._forms.minimum(strategy).peak_bytes

    def lower_bound_ms(self, budget: Budget) -> float:
        """A time, in milliseconds, that no plan of this planner beats; infinite if none can fit.

        The bound holds for every schedule of the step as captured. Where `plan` may choose chunks,
        it holds for every number and form of chunks that planning knows, too. The first call with
        chunks takes seconds.
        """
        budget_bytes = parse_budget(budget, self.baseline_peak_bytes)
        if (budget_bytes, "rockmate") in self._plans:  # handed on from a smaller one, perhaps
            return self._plans[budget_bytes, "rockmate"].lower_bound_ms
        with gc_paused():
            return self._forms.bound_of(budget_bytes)(budget_bytes)

    def _as_plan(self, budget_bytes: int, strategy: str, form: Form, candidate: Candidate) -> Plan:
        broken = broken_mark(form.step.snapshot, candidate.schedule)
        assert not broken, f"the search broke a mark: {broken}"
        return Plan(
            budget_bytes=budget_bytes - candidate.resident_bytes,
            predicted_peak_bytes=candidate.simulation.peak_bytes,
            predicted_ms=candidate.time_ms,
            baseline_peak_bytes=self.baseline_peak_bytes,
            baseline_ms=self.baseline_ms,
            minimum_peak_bytes=self.minimum_peak_bytes,
            schedule=candidate.schedule,
            simulation=candidate.simulation,
            costs=form.costs,
            snapshot=form.step.snapshot,
            chain=form.chain,
            options=form.step.options,
            find_notes=self._forms.notes(form, budget_bytes),
            fusion=form.step.fusion.report if form.step.fusion else None,
            captured=form.graph,
            strategy=strategy,
            machine=self._machine.name if self._machine else None,
            offload=self._offload,
            gap_tolerance=self._rule.gap_tolerance,
            is_cut_short=self._rule.is_late,
            bound=self._forms.bound_of(budget_bytes),
            num_unproved_blocks=int(not candidate.is_proved),
        )


def _least_of(plan: Plan, other: Plan) -> Callable[[int], float]:
    """The least of two plans' bounds, as they may be of different forms."""
    bounds = [each.bound for each in (plan, other)]
    return lambda budget: min(each(budget) if callable(each) else each for each in bounds)


def never_slower(plans: Mapping[int, Plan]) -> dict[int, Plan]:
    """The plans by growing budget, none of them slower than one for less memory.

    A search is a heuristic, and now and then the plan that it finds for more memory is a little
    slower. A plan that fits a smaller budget fits a larger one.
    """
    found: dict[int, Plan] = {}
    fastest: Plan | None = None
    for budget_bytes, plan in sorted(plans.items()):
        chosen = plan
        if fastest is not None and fastest.predicted_ms < plan.predicted_ms:
            chosen = replace(fastest, budget_bytes=budget_bytes, bound=_least_of(plan, fastest))
        found[budget_bytes] = fastest = chosen
    return found
