"""A planning session: a step captured once, its costs, and plans for any number of budgets.

capture_step -> costs -> chunk variants -> search -> Plan. A session knows no `RockmateModule`:
it returns data (`Plan`) and the code that runs it (`PlannedCall`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from torch import nn
from tqdm import tqdm

from rockmate.budget import Budget, parse_budget, parse_budgets
from rockmate.capture.huggingface import modules_with_checkpointing
from rockmate.collector import gc_paused
from rockmate.costs.cost import Cost, Costs
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.machine import Machine, load_machine
from rockmate.costs.measure import measure_costs
from rockmate.errors import InfeasibleBudgetError
from rockmate.graph.ir import Graph
from rockmate.plan.plan import Plan
from rockmate.planning.candidate import Candidate
from rockmate.planning.chunk_variants import Variant, Variants
from rockmate.runtime.planned_call import PlannedCall
from rockmate.step import CapturedStep, capture_step

logger = logging.getLogger("rockmate")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """What one budget buys.

    Attributes:
        budget_bytes: the budget.
        predicted_peak_bytes: the peak of its plan, at most the budget.
        predicted_ms: time of one forward and backward.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_ms: float


class PlanningSession:
    """Captures and measures a model once, then plans for any number of budgets; see `Planner`."""

    timings: dict[str, float]
    allow_chunking: bool | None
    baseline_peak_bytes: int
    baseline_ms: float

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        *,
        differentiable: Literal["loss", "all"] = "loss",
        outputs: Literal["all", "loss"] = "all",
        gradients: Literal["accumulated", "returned"] = "accumulated",
        time_limit_s: float = 30.0,
        progress: bool = False,
        machine: str | Path | Machine | None = None,
        untraced: Sequence[str] = (),
        allow_chunking: bool | None = None,
    ) -> None:
        """Captures the joint graph, measures its ops and solves for all budgets.

        Args:
            model: a module in training mode, on the device that it will train on; with `machine` on any, the meta device included.
            sample_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments. Its shapes, dtypes
                and constants are what is planned for; its values do not matter.
            differentiable: "loss" gives only the loss a backward where the output has one; "all" every output that has one in eager.
            outputs: "loss" returns `None` for all output tensors but the loss, whose memory then need not be held.
            gradients: "accumulated" adds each parameter's gradient to `.grad` as soon as it is final; "returned" returns them all at
                the end of the backward, which `torch.autograd.grad` needs and which takes their memory at once.
            time_limit_s: wall time that all solves of the default strategy may take together, those in chunks included, one at most half
                of what is left. A problem cut short is answered from the vertices of its convex hull, found in polynomial time. The
                lower bound of a budget may take as long again, and so may "checkmate" for each budget.
            progress: shows a progress bar while ops are measured.
            machine: estimates costs for it instead of measuring them here: a name as "h100", or the path of a description of your own
                (see `rockmate.machine`). If the model is not on such a device, there is a plan and a frontier but no module.
            untraced: paths of submodules that cannot be captured (control flow that depends on values): each runs as it is, its memory
                and time measured, and the rest is planned around it. Recurrent layers run so without being named.
            allow_chunking: whether the loss block may run in chunks of its rows, which adds up the same numbers in another order. None
                takes chunks for budgets that nothing else meets, True wherever they are faster, False never.

        Raises:
            InvalidSampleError: the sample does not fit the model, or nothing requires a gradient.
            UnsupportedModelError: the model cannot be captured as one static graph.
            MachineError: the machine is not known, or its description cannot be used.
        """
        self.timings = {}
        target = None if machine is None else load_machine(machine)
        with self._timed("capture"):
            step = capture_step(
                model,
                sample_input,
                differentiable=differentiable,
                outputs=outputs,
                gradients=gradients,
                machine=target,
                untraced=untraced,
            )
        if modules_with_checkpointing(model):
            logger.warning(
                "gradient checkpointing is off in the planned forward: the plan recomputes instead"
            )
        self._prepare(
            step,
            target,
            allow_chunking=allow_chunking,
            time_limit_s=time_limit_s,
            progress=progress,
        )

    @classmethod
    def of(
        cls,
        step: CapturedStep,
        *,
        time_limit_s: float = 30.0,
        progress: bool = False,
        machine: str | Path | Machine | None = None,
        allow_chunking: bool | None = None,
    ) -> Self:
        """A session for a step that has been captured; arguments and errors as for the class."""
        planner = cls.__new__(cls)
        planner.timings = {}
        target = None if machine is None else load_machine(machine)
        planner._prepare(
            step,
            target,
            allow_chunking=allow_chunking,
            time_limit_s=time_limit_s,
            progress=progress,
        )
        return planner

    def _prepare(
        self,
        step: CapturedStep,
        target: Machine | None,
        *,
        allow_chunking: bool | None,
        time_limit_s: float,
        progress: bool,
    ) -> None:
        self._step, self._machine, self.allow_chunking = step, target, allow_chunking
        known: dict[Hashable, Cost] = {}

        def costs_of(graph: Graph) -> Costs:
            return (
                measure_costs(graph, progress=progress, known=known)
                if target is None
                else estimate_costs(graph, target)
            )

        with self._timed("costs"):
            self._variants = Variants(
                self._step, costs_of, allow_chunking=allow_chunking, time_limit_s=time_limit_s
            )
        with self._timed("solve"):
            self._variants.plain.search("rockmate").minimum()
        self.baseline_peak_bytes = self._variants.plain.baseline.peak_bytes
        self.baseline_ms = self._variants.plain.baseline.time_ms
        self._plans: dict[tuple[int, str], Plan] = {}

    @cached_property
    def minimum_peak_bytes(self) -> int:
        """See the class."""
        return self.minimum_peak()

    def plan(self, budget: Budget, *, strategy: str = "rockmate") -> Plan:
        """The fastest schedule known within `budget`; no new capture, no new measurement.

        Args:
            budget: bytes (int), a size ("6GiB", "800MB"), or a fraction in (0, 1] of `baseline_peak_bytes`.
            strategy: one of `rockmate.STRATEGIES`; all but the default are there to compare with.

        Raises:
            InvalidBudgetError: the budget cannot be read.
            InfeasibleBudgetError: no schedule known fits it; the error carries the smallest peak.
            SolverLimitError: the strategy "checkmate" found no schedule in its time.
            ValueError: there is no such strategy.
        """
        budget_bytes = parse_budget(budget, self.baseline_peak_bytes)
        plan = self._plan_within(budget_bytes, strategy)
        if plan is None:
            with gc_paused():
                raise self._infeasible(budget_bytes, strategy)
        return plan

    def _plan_within(self, budget_bytes: int, strategy: str) -> Plan | None:
        if (budget_bytes, strategy) not in self._plans:
            with gc_paused():
                best = self._variants.best_within(budget_bytes, strategy)
                if best is None:
                    return None
                self._plans[budget_bytes, strategy] = self._as_plan(budget_bytes, strategy, *best)
        return self._plans[budget_bytes, strategy]

    def plans(self, budgets: Iterable[Budget] | str, *, progress: bool = False) -> dict[int, Plan]:
        """Plans of the default strategy for many budgets, by bytes; where twenty or more fit, in much less time than one by one.

        So many are planned together, each beginning with those of its neighbours, and a larger budget never takes longer. They come as
        near to the bound as those of `plan`, but where that is far, close to the smallest peak, some are a few percent of a step slower
        than those, or faster, and up to a tenth slower at the smallest peak itself. What may be in chunks is planned one by one, so with
        `allow_chunking=True` all are. Budgets for which there is no plan are left out. `module_of` trains one.

        Args:
            budgets: each as for `plan`, or text as "0.2:1.0:50".
            progress: shows a progress bar.

        Raises:
            InvalidBudgetError: a budget cannot be read.
        """
        listed = parse_budgets(budgets) if isinstance(budgets, str) else budgets
        asked = sorted({parse_budget(budget, self.baseline_peak_bytes) for budget in listed})
        plans = self.plan_many(asked, progress=progress)
        alone = [budget_bytes for budget_bytes in asked if budget_bytes not in plans]
        for budget_bytes in tqdm(
            alone, desc="planning", unit="budget", disable=not (progress and alone)
        ):
            plan = self._plan_within(budget_bytes, "rockmate")
            if plan is not None:
                plans[budget_bytes] = plan
        return dict(sorted(plans.items()))

    def plan_many(self, budgets: Sequence[int], *, progress: bool = False) -> dict[int, Plan]:
        """Those of `plans` that are planned together, budgets in bytes; none where they are too few."""
        with gc_paused():
            found = self._variants.best_within_each(budgets, progress=progress)
            return {
                budget_bytes: self._as_plan(budget_bytes, "rockmate", *best)
                for budget_bytes, best in found.items()
            }

    def planned_call(self, budget: Budget, *, strategy: str = "rockmate") -> PlannedCall:
        """A plan within `budget` with the code that runs it; see `plan`."""
        self._step.check_present()
        plan = self.plan(budget, strategy=strategy)
        return self._variants.of(plan.options).planned_call(plan)

    def planned_call_of(self, plan: Plan) -> PlannedCall:
        """A plan that another planner made for the same step, with the code that runs it; `PlanMismatchError` if it was another."""
        return self._variants.of(plan.options).planned_call(plan)

    def frontier(self, *, strategy: str = "rockmate") -> tuple[FrontierPoint, ...]:
        """Budgets from the smallest peak to that of no recomputation, and the least time known for each.

        `plan` gives the same time at each point's budget. Budgets grow and times fall from point to point.
        """
        with gc_paused():
            points = self._variants.frontier(strategy)
        return tuple(
            FrontierPoint(
                budget_bytes=budget_bytes,
                predicted_peak_bytes=candidate.simulation.peak_bytes,
                predicted_ms=candidate.simulation.time_ms,
            )
            for budget_bytes, candidate in points
        )

    def minimum_peak(self, strategy: str = "rockmate") -> int:
        """The smallest budget, in bytes, for which `strategy` always has a plan; unless `allow_chunking` is true, one without chunks."""
        return self._variants.minimum(strategy).simulation.peak_bytes

    def lower_bound_ms(self, budget: Budget) -> float:
        """A time that no plan of this planner for `budget` beats, in milliseconds; infinite where none can fit.

        It holds for every schedule of the step as captured and, where `plan` may choose chunks, of the step in any of the numbers and
        forms of chunks that planning knows: for budgets that nothing else meets, with `allow_chunking=True` for all. Where there are
        chunks, the first call takes seconds. See `rockmate.certificate`.
        """
        budget_bytes = parse_budget(budget, self.baseline_peak_bytes)
        with gc_paused():
            return self._variants.bounds_within(budget_bytes).tight_bound_ms(budget_bytes)

    def _infeasible(self, budget_bytes: int, strategy: str) -> InfeasibleBudgetError:
        minimum_bytes = self._variants.least(strategy).simulation.peak_bytes
        smallest = self.plan(minimum_bytes, strategy=strategy)
        return InfeasibleBudgetError(
            budget_bytes,
            minimum_bytes,
            where=smallest.peak_place(),
            slowdown=smallest.predicted_ratio,
        )

    def _as_plan(
        self, budget_bytes: int, strategy: str, variant: Variant, candidate: Candidate
    ) -> Plan:
        return Plan(
            budget_bytes=budget_bytes,
            predicted_peak_bytes=candidate.simulation.peak_bytes,
            predicted_ms=candidate.simulation.time_ms,
            baseline_peak_bytes=self.baseline_peak_bytes,
            baseline_ms=self.baseline_ms,
            minimum_peak_bytes=self.minimum_peak_bytes,
            schedule=candidate.schedule,
            simulation=candidate.simulation,
            costs=variant.costs,
            snapshot=variant.snapshot,
            chain=variant.chain,
            options=variant.step.options,
            chunking_notes=self._variants.notes(variant),
            captured=variant.graph,
            strategy=strategy,
            machine=self._machine.name if self._machine else None,
            bounds=self._variants.bounds_within(budget_bytes),
            num_unproved_blocks=variant.search(strategy).num_unproved + (not candidate.is_proved),
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        with gc_paused():
            yield
        self.timings[stage] = time.perf_counter() - begin
        logger.debug("%s took %.2f s", stage, self.timings[stage])
