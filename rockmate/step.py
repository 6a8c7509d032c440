"""A captured training step: the subject of a plan. No solver is needed, nothing is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from rockmate.bound.protocol import StoredBound
from rockmate.capture.compiled_model import innermost
from rockmate.capture.memory_format import Formats, MemoryFormat
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.options import check_choices, num_in_flight_of
from rockmate.capture.roles import Capture
from rockmate.capture.sample import Sample, read_sample, trace_sample
from rockmate.capture.signature import CallSignature
from rockmate.costs.convolution_formats import in_fastest_formats
from rockmate.costs.layout_check import captured_in_kernel_layouts, check_traced
from rockmate.costs.machine import Machine
from rockmate.errors import PlanMismatchError
from rockmate.fusion.rewrite import COMPILE_LIMIT_S, Fusion
from rockmate.graph.build import build_graph
from rockmate.graph.chunking.chunks import (
    Chunks,
    SeparableBlocks,
    chunk_loss_block,
    separable_blocks,
)
from rockmate.graph.chunking.region import Refusal
from rockmate.graph.convolution_formats import format_options, kinds_of_options
from rockmate.graph.hooked_gradients import hooked_names, shared_names
from rockmate.graph.ir import Graph
from rockmate.graph.mark_request import MarkRequest, Policy
from rockmate.graph.node_marks import decided_request, without_source
from rockmate.graph.parameters import owner_names
from rockmate.graph.passes import (
    GRAPH_PASSES,
    JOINT_PASSES,
    REWRITES,
    PassOptions,
    run_passes,
)
from rockmate.graph.snapshot_capture import snapshot_of
from rockmate.plan.plan import Plan
from rockmate.plan.renumbering import renumbered
from rockmate.runtime.emit import emit
from rockmate.runtime.model_checks import check_model
from rockmate.runtime.planned_call import PlannedCall
from rockmate.schedule.schedule import baseline_schedule, find_in_place, moved_like
from rockmate.schedule.simulate import simulate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedStep:
    """One training step of a model, for one sample.

    Attributes:
        model: the model.
        capture: the joint graph with the roles of its inputs and outputs.
        graph: the joint graph as ops on storages.
        call: signature of the calls that the step serves.
        state: signature of the model at the capture.
        options: options of the capture; see `capture_step`.
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
    options: Mapping[str, str]
    absence: str = ""
    allocation_bytes: int | None = None
    fusion: Fusion | None = None

    def separable_blocks(self, *, least_bytes: int = 0) -> SeparableBlocks:
        """Blocks that can run in chunks, and reasons for those that cannot.

        See `rockmate.graph.chunking.chunks.separable_blocks`.
        """
        return separable_blocks(self.capture, least_bytes=least_bytes)

    def in_chunks(self, chunks: Chunks) -> CapturedStep | Refusal:
        """The step with its loss block or feed-forward blocks in chunks, or why not."""
        returned = self.options["gradients"] == "returned"
        capture = chunk_loss_block(self.capture, chunks, returned_gradients=returned)
        if isinstance(capture, Refusal):
            return capture
        options = {**self.options, "loss_chunks": str(chunks)}
        step = step_of(
            capture,
            self.model,
            self.call,
            self.state,
            options,
            allocation_bytes=self.allocation_bytes,
            fusion=self.fusion,
        )
        return replace(step, absence=self.absence)

    def fused(
        self,
        *,
        unfused: str | None = None,
        progress: bool = False,
        compile_limit_s: float = COMPILE_LIMIT_S,
    ) -> CapturedStep:
        """The step with its groups of ops fused.

        Args:
            unfused: see `capture_step`.
            progress: as for `Planner`.
            compile_limit_s: as for `Planner`.
        """
        if self.fusion is not None and self.options["unfused"] == unfused:
            return self
        step = step_of(
            self.capture,
            self.model,
            self.call,
            self.state,
            {**self.options, "kernels": "fused"},
            allocation_bytes=self.allocation_bytes,
            fusion=Fusion.of(
                unfused,
                progress=progress,
                is_run=not self.absence,
                compile_limit_s=compile_limit_s,
            ),
        )
        return replace(step, absence=self.absence)

    def without_marks(self, source: str) -> CapturedStep:
        """The same step without the marks of one source; its ops have the same indices."""
        capture = without_source(self.capture, source)
        step = step_of(
            capture,
            self.model,
            self.call,
            self.state,
            self.options,
            allocation_bytes=self.allocation_bytes,
        )
        return replace(step, absence=self.absence)

    def in_form_of(self, plan: Plan) -> CapturedStep:
        """The step in the chunks of `plan` where those are possible, else itself."""
        if "loss_chunks" not in plan.options:
            return self
        chunked = self.in_chunks(Chunks.parse(plan.options["loss_chunks"]))
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
        snapshot = snapshot_of(self.graph, self.call)
        if dict(plan.options) != dict(self.options) or not plan.snapshot.serves_smaller(snapshot):
            return None
        if (schedule := moved_like(plan.schedule, self.graph)) is None:
            return None
        if in_place is not None:
            schedule = replace(schedule, in_place=in_place)
        schedule.verify(self.graph)
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
            bounds=StoredBound(),
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
        snapshot = snapshot_of(self.graph, self.call)
        difference = plan.snapshot.difference(snapshot)
        if not difference and dict(plan.options) != dict(self.options):
            difference = (
                f"it was made with {dict(plan.options)}, and the step was captured with "
                f"{dict(self.options)}"
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
        schedule.verify(self.graph)
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
    *,
    differentiable: Literal["loss", "all"] = "loss",
    outputs: Literal["all", "loss"] = "all",
    gradients: Literal["accumulated", "returned"] = "accumulated",
    untraced: str | Sequence[str] = (),
    machine: Machine | None = None,
    loss_chunks: str = "",
    hooked: str | None = None,
    whole_shared: bool = False,
    kernels: Literal["eager", "fused"] = "eager",
    memory_format: MemoryFormat = "as_given",
    output_layouts: str = "",
    contiguous_convolutions: str | None = None,
    unfused: str | None = None,
    progress: bool = False,
    compile_limit_s: float = COMPILE_LIMIT_S,
    marks: Mapping[Any, str] | str | None = None,
    policy: Policy | str | None = None,
    existing_checkpoints: str = "lift",
    in_flight: int | str = 1,
) -> CapturedStep:
    """Captures the joint graph of a model for a sample.

    Arguments and errors are those of `Planner`. Marks, a policy, `in_flight`, and three more are
    texts as in `CapturedStep.options`. `hooked`: parameters with whole gradients; None takes those
    with a tensor hook, and with `whole_shared` those to which several gradients flow.
    `memory_format`: "channels_last" gives convolutions their inputs so; `output_layouts` are as of
    the function, "" leaves them. `contiguous_convolutions` are kinds of those that compute on
    contiguous values, `unfused` groups that stay; None measures. `loss_chunks`: see `Chunks`.

    Raises:
        PlanMismatchError: the loss block cannot run in the chunks of `loss_chunks`.
    """
    options = {"differentiable": differentiable, "outputs": outputs, "gradients": gradients}
    check_choices(**options, kernels=kernels, memory_format=memory_format)
    model, request = innermost(model), MarkRequest.of(marks, policy, existing_checkpoints)
    names = tuple(untraced.split(",")) if isinstance(untraced, str) else tuple(untraced)
    options |= {"untraced": ",".join(names)} if names else {}
    options |= {"in_flight": str(in_flight)} if num_in_flight_of(in_flight) > 1 else {}
    check_model(model, names, machine)
    sample = read_sample(model, sample_input, machine.torch_device if machine else None)
    formats = Formats(memory_format, output_layouts)
    traced: Any = {"differentiable": differentiable, "outputs": outputs, "untraced": names}
    traced |= {"formats": formats, "keeps_checkpoints": request.honours_checkpoints}
    capture = trace_sample(model, sample, **traced)
    state = _state_of(model, hooked, capture if whole_shared else None, options)
    options |= format_options(formats, contiguous_convolutions)
    capture = _rewritten(capture, request, options)
    if "memory_format" in options and contiguous_convolutions is None:
        options["contiguous_convolutions"] = in_fastest_formats(capture, progress=progress)
    limits: Any = {"progress": progress, "compile_limit_s": compile_limit_s}
    fusion = _fusion_of(unfused, sample, machine, limits) if kernels == "fused" else None
    options |= {"kernels": kernels} if fusion else {}
    further: Any = {"allocation_bytes": machine and machine.allocation_bytes, "fusion": fusion}
    step = step_of(capture, model, sample.call, state, options, **further)
    step = _chunked(step, loss_chunks) if loss_chunks else step
    return replace(step, absence=sample.absence)


def checked_step(capture: Callable[[], CapturedStep]) -> CapturedStep:
    """A step that will not be measured, captured in the layouts that kernels give."""

    def checked() -> CapturedStep:
        step = capture()
        check_traced(() if step.absence else step.capture.traced)
        return step

    return captured_in_kernel_layouts(checked)


def _rewritten(capture: Capture, request: MarkRequest, options: dict[str, str]) -> Capture:
    """The capture after `REWRITES`, and in `options` what the marks have decided."""
    request = decided_request(capture, request)
    options |= request.options
    passes = PassOptions(marks=request, contiguous=kinds_of_options(options))
    return run_passes(REWRITES, capture, passes)


def _fusion_of(
    unfused: str | None, sample: Sample, machine: Machine | None, limits: Mapping[str, Any]
) -> Fusion:
    """How groups will be fused."""
    is_run, is_timed = sample.device is None, machine is None
    return Fusion.of(unfused, is_run=is_run, is_timed=is_timed, **limits)


def _state_of(
    model: nn.Module, hooked: str | None, capture: Capture | None, options: dict[str, str]
) -> ModelSignature:
    """The model's state after its capture, for which it may change itself.

    Names of parameters with whole gradients, as given or as found, go to `options`: those with a
    tensor hook, and those to which several gradients flow in `capture`.
    """
    state = ModelSignature.of(model)
    if hooked is not None:
        state = replace(state, hooked=frozenset(hooked_names({"hooked": hooked})))
    if capture is not None:
        shared = shared_names(capture, owner_names(model))
        state = replace(state, hooked=state.hooked | shared)
    if state.hooked and options["gradients"] == "accumulated":
        options["hooked"] = ",".join(sorted(state.hooked))
    return state


def _chunked(step: CapturedStep, loss_chunks: str) -> CapturedStep:
    """The step with its loss block in chunks, which a plan asks for.

    Raises:
        PlanMismatchError: the loss block cannot be chunked.
    """
    chunked = step.in_chunks(Chunks.parse(loss_chunks))
    if isinstance(chunked, Refusal):
        msg = (
            f"the plan takes the loss block in chunks ({loss_chunks}), and this model's cannot be: "
            f"{chunked}. Plan again."
        )
        raise PlanMismatchError(msg)
    return chunked


def step_of(
    capture: Capture,
    model: nn.Module,
    call: CallSignature,
    state: ModelSignature,
    options: Mapping[str, str],
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
        options: see `capture_step`.
        allocation_bytes: see `build_graph`.
        like: see `PassOptions`.
        fusion: how groups of ops are fused; None leaves every op by itself.
    """
    returned = options["gradients"] == "returned"
    passes = PassOptions(
        hooked=hooked_names(options),
        owner_of=owner_names(model),
        like=like,
        contiguous=kinds_of_options(options),
        returned=returned,
    )
    capture = run_passes(JOINT_PASSES, capture, passes)

    def build(joint: Capture) -> Graph:
        return build_graph(joint, returned_gradients=returned, allocation_bytes=allocation_bytes)

    if fusion is None:
        built = build(capture)
    else:
        fusion, fused = fusion.run(capture, build)
        options = {**options, "unfused": fusion.refused_text}
        built = build(fused)
    graph = run_passes(GRAPH_PASSES, built, passes)
    graph = replace(graph, num_in_flight=int(options.get("in_flight", "1")))
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
