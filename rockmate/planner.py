"""Model, sample and budget -> plan: the pipeline on one page, with no logic of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from rockmate.budget import Budget, parse_budget
from rockmate.capture import capture_joint
from rockmate.costs import measure_costs
from rockmate.delivery import owner_names, split_handovers
from rockmate.emit import emit
from rockmate.errors import InfeasibleBudgetError, InvalidSampleError, UnsupportedModelError
from rockmate.graph import build_graph
from rockmate.module import PlannedCall, RockmateModule
from rockmate.partition import partition
from rockmate.plan import Plan
from rockmate.rewrite import rewrite
from rockmate.search import Candidate, Search
from rockmate.signature import ModelSignature, check_devices, flatten_call, hook_keys, optional_keywords, sample_call

logger = logging.getLogger("rockmate")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """What one budget buys.

    Attributes:
        budget_bytes: the smallest budget that buys it.
        predicted_peak_bytes: the peak of its plan.
        predicted_ms: time of one forward and backward.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_ms: float


class Planner:
    """Captures and measures a model once, then plans for any number of budgets.

    Attributes:
        timings: seconds spent in "capture", "costs" and "solve"; planning for one more budget is not among them.
        baseline_peak_bytes: the activation peak with nothing recomputed.
        baseline_ms: time of one forward and backward with nothing recomputed.
        minimum_peak_bytes: the smallest budget for which there is a plan.
    """

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
    ) -> None:
        """Captures the joint graph, measures its ops and solves for all budgets.

        Args:
            model: a module in training mode, on the device that it will train on.
            sample_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments. Its shapes, dtypes
                and constants are what is planned for; its values do not matter.
            differentiable: "loss" gives only the loss a backward where the output has one; "all" every output that has one in eager.
            outputs: "loss" returns `None` for all output tensors but the loss, whose memory then need not be held.
            gradients: "accumulated" adds each parameter's gradient to `.grad` as soon as it is final; "returned" returns them all at
                the end of the backward, which `torch.autograd.grad` needs and which takes their memory at once.
            time_limit_s: cap on each call of a solver.
            progress: shows a progress bar while ops are measured.

        Raises:
            InvalidSampleError: the sample does not fit the model, or nothing requires a gradient.
            UnsupportedModelError: the model cannot be captured as one static graph.
        """
        _check_choices(differentiable=differentiable, outputs=outputs, gradients=gradients)
        if hasattr(model, "_orig_mod"):
            msg = "the model has been through torch.compile, whose graphs cannot be captured again. Pass the model itself."
            raise UnsupportedModelError(msg)
        if not model.training:
            msg = "the model is in eval mode, where a plan is never used. Call model.train() first."
            raise InvalidSampleError(msg)
        args, kwargs = sample_call(sample_input)
        tensors, self._call = flatten_call(args, kwargs, optional_keywords(model))
        check_devices(model, tensors)
        self.timings: dict[str, float] = {}
        self._model = model
        self._state = ModelSignature.of(model)
        hooked = [path for path, module in model.named_modules() if path and hook_keys(module)]
        if hooked:
            logger.warning("hooks of submodules run when the model is captured and not in planned training steps: %s", ", ".join(hooked))
        self._gradients = gradients
        with self._timed("capture"):
            self._capture = capture_joint(model, tensors, self._call.structure, differentiable=differentiable, outputs=outputs)
            rewrite(self._capture.joint)
            self._graph = build_graph(self._capture, returned_gradients=gradients == "returned")
            split_handovers(self._graph)
        with self._timed("costs"):
            costs = measure_costs(self._graph, progress=progress)
        with self._timed("solve"):
            self._search = Search(self._graph, partition(self._graph), costs, time_limit_s=time_limit_s)
            self._minimum = self._search.minimum()
        self.baseline_peak_bytes = self._search.baseline.simulation.peak_bytes
        self.baseline_ms = self._search.baseline.simulation.time_ms
        self.minimum_peak_bytes = self._minimum.simulation.peak_bytes
        self._plans: dict[int, Plan] = {}

    def plan(self, budget: Budget) -> Plan:
        """The fastest schedule known within `budget`; no new capture, no new measurement.

        Args:
            budget: bytes (int), a size ("6GiB", "800MB"), or a fraction in (0, 1] of `baseline_peak_bytes`.

        Raises:
            InvalidBudgetError: the budget cannot be read.
            InfeasibleBudgetError: it is below `minimum_peak_bytes`; the error carries that.
        """
        budget_bytes = parse_budget(budget, self.baseline_peak_bytes)
        if budget_bytes < self.minimum_peak_bytes:
            smallest = self._as_plan(self.minimum_peak_bytes, self._minimum)
            raise InfeasibleBudgetError(
                budget_bytes, self.minimum_peak_bytes, where=smallest.peak_place(), slowdown=smallest.predicted_ratio
            )
        if budget_bytes not in self._plans:
            best = self._search.best_within(budget_bytes)
            assert best is not None, f"no schedule within {budget_bytes} bytes though the minimum is {self.minimum_peak_bytes}"
            self._plans[budget_bytes] = self._as_plan(budget_bytes, best)
        return self._plans[budget_bytes]

    def module(self, budget: Budget) -> RockmateModule:
        """A module that trains within `budget`; see `plan`."""
        return RockmateModule.of(self._model, self.planned_call(budget))

    def planned_call(self, budget: Budget) -> PlannedCall:
        """A plan within `budget` with the code that runs it; see `plan`."""
        plan = self.plan(budget)
        return PlannedCall(
            plan=plan,
            program=emit(self._graph, plan.schedule, owner_names(self._model)),
            call=self._call,
            state=self._state,
            output_structure=self._capture.output_structure,
        )

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The least time for every budget: points of growing budget and falling time, from what was solved once."""
        return tuple(
            FrontierPoint(
                budget_bytes=candidate.simulation.peak_bytes,
                predicted_peak_bytes=candidate.simulation.peak_bytes,
                predicted_ms=candidate.simulation.time_ms,
            )
            for candidate in self._search.frontier()
        )

    def _as_plan(self, budget_bytes: int, candidate: Candidate) -> Plan:
        return Plan(
            budget_bytes=budget_bytes,
            predicted_peak_bytes=candidate.simulation.peak_bytes,
            predicted_ms=candidate.simulation.time_ms,
            baseline_peak_bytes=self.baseline_peak_bytes,
            baseline_ms=self.baseline_ms,
            schedule=candidate.schedule,
            simulation=candidate.simulation,
            graph=self._graph,
            num_unproved_blocks=self._search.num_unproved,
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.timings[stage] = time.perf_counter() - begin
        logger.debug("%s took %.2f s", stage, self.timings[stage])


_CHOICES = {"differentiable": ("loss", "all"), "outputs": ("all", "loss"), "gradients": ("accumulated", "returned")}


def _check_choices(**options: str) -> None:
    for name, value in options.items():
        if value not in _CHOICES[name]:
            msg = f"{name} is {value!r}; choose one of {', '.join(map(repr, _CHOICES[name]))}"
            raise ValueError(msg)
