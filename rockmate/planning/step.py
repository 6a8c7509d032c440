"""A captured training step: the subject of a plan. No solver is needed, nothing is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from rockmate.capture.compiled_model import innermost
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.roles import Capture
from rockmate.capture.sample import read_sample, trace_sample
from rockmate.capture.signature import CallSignature
from rockmate.costs.layout_check import captured_in_kernel_layouts, check_traced
from rockmate.costs.machine import Machine
from rockmate.errors import PlanMismatchError
from rockmate.fusion.report import COMPILE_LIMIT_S
from rockmate.fusion.rewrite import Fusion
from rockmate.graph.build import build_graph
from rockmate.graph.chunking.chunks import Chunks, chunk_loss_block
from rockmate.graph.chunking.region import Refusal
from rockmate.graph.hooked_gradients import shared_names
from rockmate.graph.ir import Graph
from rockmate.graph.node_marks import decided_request, without_source
from rockmate.graph.parameters import owner_names
from rockmate.graph.passes import GRAPH_PASSES, JOINT_PASSES, REWRITES, run_passes
from rockmate.graph.snapshot import StepSnapshot
from rockmate.graph.snapshot_capture import snapshot_of
from rockmate.graph.step_options import StepOptions
from rockmate.plan.faults import fault_of
from rockmate.plan.plan import Plan
from rockmate.plan.renumbering import renumbered
from rockmate.runtime.emit import emit
from rockmate.runtime.model_checks import check_model
from rockmate.runtime.program import PlannedCall
from rockmate.schedule.move import movable_storages
from rockmate.schedule.schedule import baseline_schedule, find_in_place, moved_like
from rockmate.schedule.simulate import simulate

logger = logging.getLogger(__name__)

_DEFAULTS = StepOptions()


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedStep:
    """One training step of a model, for one sample.

    Attributes:
        model: the model.
        capture: the joint graph with the roles of its inputs and outputs.
        graph: the joint graph as ops on storages.
        call: signature of the calls that the step serves.
        state: signature of the model at the capture.
        options: of the capture, with what it has decided.
        absence: why there is nothing here to train the step with; empty if there is.
        allocation_bytes: storages take multiples of it. None: as the allocator of their device
            rounds.
        fusion: how groups of ops were fused; None if every op runs by itself. The capture has the
            ops, the graph has the groups.
    """

    model: nn.Module
    capture: Capture
    graph: Graph
    call: CallSignature
    state: ModelSignature
    options: StepOptions
    absence: str = ""
    allocation_bytes: int | None = None
    fusion: Fusion | None = None

    @cached_property
    def snapshot(self) -> StepSnapshot:
        """The step as plain values."""
        return snapshot_of(self.graph, self.call)

    @property
    def text(self) -> str:
        """Tells the step and its options, whatever its costs; see `StepSnapshot.text`."""
        return self.snapshot.text(self.options)

    def in_chunks(self, chunks: Chunks) -> CapturedStep | Refusal:
        """The step with its loss block or feed-forward blocks in chunks, or why not."""
        returned = self.options.gradients == "returned"
        capture = chunk_loss_block(self.capture, chunks, returned_gradients=returned)
        if isinstance(capture, Refusal):
            return capture
        return self._of(capture, replace(self.options, loss_chunks=chunks), self.fusion)

    def fused(
        self,
        *,
        unfused: tuple[str, ...] | None = None,
        progress: bool = False,
        compile_limit_s: float = COMPILE_LIMIT_S,
    ) -> CapturedStep:
        """The step with its groups of ops fused.

        Args:
            unfused: see `StepOptions`.
            progress: as for `Planner`.
            compile_limit_s: as for `Planner`.
        """
        if self.fusion is not None and self.options.unfused == unfused:
            return self
        fusion = Fusion(
            refused=unfused,
            progress=progress,
            is_run=not self.absence,
            compile_limit_s=compile_limit_s,
        )
        return self._of(self.capture, self.options, fusion)

    def without_marks(self, source: str) -> CapturedStep:
        """The same step without the marks of one source; its ops have the same indices."""
        return self._of(without_source(self.capture, source), self.options)

    def _of(
        self, capture: Capture, options: StepOptions, fusion: Fusion | None = None
    ) -> CapturedStep:
        """The step of another form of the same capture."""
        size = self.allocation_bytes
        step = step_of(
            capture, self.model, self.call, self.state, options, allocation_bytes=size,
            fusion=fusion,
        )  # fmt: skip
        return replace(step, absence=self.absence)

    def with_chunks_of(self, options: StepOptions) -> CapturedStep:
        """The step in the chunks of `options` where those are possible, else itself."""
        chunked = self.in_chunks(options.loss_chunks) if options.loss_chunks else self
        return self if isinstance(chunked, Refusal) else chunked

    def planned_call(self, plan: Plan) -> PlannedCall:
        """The code that runs a plan, with the plan.

        A plan of another capture is first checked against this one.

        Raises:
            PlanMismatchError: the plan is for another model, sample, device or options, or its
                schedule is not valid here.
        """
        self.check_present()
        if plan.captured is not self.graph:
            plan = self._adopted(plan)
        owners = owner_names(self.model)
        return PlannedCall(
            plan_of=lambda: plan,
            program=emit(self.graph, plan.schedule, owners, plan.flights, plan.offload),
            call=self.call,
            state=self.state,
            output_structure=self.capture.output_structure,
            non_differentiable_outputs=self.capture.non_differentiable_outputs,
            attributes=self.capture.attributes,
            read_values=self.capture.read_values,
        )

    def adapted(self, plan: Plan, *, in_place: frozenset[int] | None = None) -> Plan | None:
        """The plan of a larger sample as a plan for this step; None if it does not fit.

        Nothing is measured or solved. The schedule of the plan is replayed on the sizes of this
        step. Times and overheads are those of the larger sample, so predictions are upper
        estimates.

        Args:
            plan: a plan for a step with no smaller tensor.
            in_place: positions of the runs in place. None takes every run that can be in place.
        """
        snapshot = self.snapshot
        if plan.options != self.options or not plan.snapshot.serves_smaller(snapshot):
            return None
        if (schedule := moved_like(plan.schedule, self.graph)) is None:
            return None
        if in_place is not None:
            schedule = replace(schedule, in_place=in_place)
        assert not (fault := fault_of(snapshot, schedule)), fault
        simulation = simulate(self.graph, schedule, plan.costs)
        if simulation.peak_bytes > plan.budget_bytes:
            return None
        baseline = simulate(self.graph, baseline_schedule(self.graph), plan.costs)
        return replace(
            plan,
            predicted_peak_bytes=simulation.peak_bytes,
            predicted_ms=simulation.time_ms,
            baseline_peak_bytes=baseline.peak_bytes,
            baseline_ms=baseline.time_ms,
            minimum_peak_bytes=min(plan.minimum_peak_bytes, simulation.peak_bytes),
            bound=0.0,
            schedule=schedule,
            simulation=simulation,
            snapshot=snapshot,
            captured=self.graph,
        )

    def check_present(self) -> None:
        """Raises `PlanMismatchError` if there is nothing here to train the step with."""
        if self.absence:
            raise PlanMismatchError(self.absence)

    def _adopted(self, plan: Plan) -> Plan:
        """The plan with this step's graph, replayed on it."""
        snapshot = self.snapshot
        difference = plan.snapshot.difference(snapshot)
        if not difference and plan.options != self.options:
            difference = (
                f"it was made with {plan.options.to_json()}, and the step was captured with "
                f"{self.options.to_json()}"
            )
        if difference:
            msg = (
                f"the plan does not fit this model and sample: {difference}.\nPlan for them, or "
                "use the model and the sample of the plan."
            )
            raise PlanMismatchError(msg)
        plan = renumbered(plan, snapshot)
        schedule = plan.schedule
        misplaced = sorted(schedule.in_place - find_in_place(self.graph, *schedule.order))
        if misplaced:
            msg = (
                f"step {misplaced[0]} of the plan's schedule is marked in-place, where no operand "
                "ends whose memory it could take."
            )
            raise PlanMismatchError(msg)
        fixed = {move.storage for move in schedule.moves} - movable_storages(self.graph)
        if fixed:
            msg = f"the plan moves {snapshot.storages[min(fixed)].name}, which has to stay here."
            raise PlanMismatchError(msg)
        assert not (fault := fault_of(snapshot, schedule)), fault
        simulation = simulate(self.graph, schedule, plan.costs)
        if simulation.peak_bytes > plan.predicted_peak_bytes:
            msg = (
                f"the plan's schedule has a peak of {simulation.peak_bytes:,} bytes on this model, "
                f"above the {plan.predicted_peak_bytes:,} "
                "bytes that the plan promises. Plan again."
            )
            raise PlanMismatchError(msg)
        fusion = self.fusion.report if self.fusion else None
        return replace(plan, captured=self.graph, simulation=simulation, fusion=fusion)


def capture_step(
    model: nn.Module,
    sample_input: Any,
    options: StepOptions = _DEFAULTS,
    *,
    machine: Machine | None = None,
    progress: bool = False,
    compile_limit_s: float = COMPILE_LIMIT_S,
) -> CapturedStep:
    """Captures the joint graph of a model for a sample.

    Args:
        model: as for `Planner`, as are `sample_input`, `progress` and `compile_limit_s`.
        sample_input: the sample.
        options: how it is captured. The step has them with what the capture has decided.
        machine: that the step is captured for; None for the device of the model.
        progress: whether bars are shown.
        compile_limit_s: seconds that compiling may take.

    Raises:
        RockmateError: as for `Planner`.
        PlanMismatchError: the blocks of the step cannot run in `options.loss_chunks`.
    """
    model = innermost(model)
    check_model(model, options.untraced, machine)
    sample = read_sample(model, sample_input, machine.torch_device if machine else None)
    capture = trace_sample(model, sample, **options.traced)
    # A capture may change the model, so its state is read after it.
    state, owners = ModelSignature.of(model), owner_names(model)
    if options.hooked is not None:
        state = replace(state, hooked=frozenset(options.hooked))
    elif options.is_bitwise:
        state = replace(state, hooked=state.hooked | shared_names(capture, owners))
    marks, hooked = decided_request(capture, options.marks), hooked_of(state, options)
    options = replace(options, marks=marks, hooked=hooked)
    passes = replace(options.for_passes(owners), runs_here=sample.device is None)
    capture = run_passes(REWRITES, capture, passes)
    step = step_of(
        capture,
        model,
        sample.call,
        state,
        replace(options, loss_chunks=None),
        allocation_bytes=machine.allocation_bytes if machine else None,
        fusion=None
        if options.kernels == "eager"
        else Fusion(
            # Times here say nothing of a machine that is described: all groups are taken.
            refused=() if machine and options.unfused is None else options.unfused,
            is_run=sample.device is None,
            progress=progress,
            compile_limit_s=compile_limit_s,
        ),
    )
    step = _chunked(step, options.loss_chunks) if options.loss_chunks else step
    return replace(step, absence=sample.absence)


def hooked_of(state: ModelSignature, options: StepOptions) -> tuple[str, ...]:
    """Names of the parameters with whole gradients, for a step whose backward does not return them.

    One that does has the gradients whole in any case.
    """
    return tuple(sorted(state.hooked)) if options.gradients == "accumulated" else ()


def checked_step(capture: Callable[[], CapturedStep]) -> CapturedStep:
    """A step that will not be measured, captured in the layouts that kernels give."""

    def checked() -> CapturedStep:
        step = capture()
        check_traced(() if step.absence else step.capture.traced)
        return step

    return captured_in_kernel_layouts(checked)


def _chunked(step: CapturedStep, chunks: Chunks) -> CapturedStep:
    """The step with its loss block in chunks, which a plan asks for.

    Raises:
        PlanMismatchError: the loss block cannot be chunked.
    """
    chunked = step.in_chunks(chunks)
    if isinstance(chunked, Refusal):
        msg = (
            f"the plan takes the loss block in chunks ({chunks}), and this model's cannot be: "
            f"{chunked}. Plan again."
        )
        raise PlanMismatchError(msg)
    return chunked


def step_of(
    capture: Capture,
    model: nn.Module,
    call: CallSignature,
    state: ModelSignature,
    options: StepOptions,
    *,
    allocation_bytes: int | None = None,
    like: Graph | None = None,
    fusion: Fusion | None = None,
) -> CapturedStep:
    """The step of a capture after `REWRITES`, as captured or in chunks.

    Args:
        capture: the joint graph; it is changed in place.
        model: the model of the step.
        call: signature of the calls that the step serves.
        state: signature of the model at the capture.
        options: of the step, decided.
        allocation_bytes: see `build_graph`.
        like: see `PassOptions`.
        fusion: how groups of ops are fused; None leaves every op by itself.
    """
    passes = options.for_passes(owner_names(model), like=like)
    capture = run_passes(JOINT_PASSES, capture, passes)

    def build(joint: Capture) -> Graph:
        return build_graph(
            joint,
            returned_gradients=options.gradients == "returned",
            allocation_bytes=allocation_bytes,
        )

    if fusion is None:
        built = build(capture)
    else:
        fusion, fused = fusion.run(capture, build)
        options = replace(options, kernels="fused", unfused=fusion.refused)
        built = build(fused)
    graph = run_passes(GRAPH_PASSES, built, passes)
    graph = replace(graph, num_in_flight=options.in_flight)
    graph.verify()
    return CapturedStep(
        model=model,
        capture=capture,
        graph=graph,
        call=call,
        state=state,
        options=options,
        allocation_bytes=allocation_bytes,
        fusion=fusion,
    )
