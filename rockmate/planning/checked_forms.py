"""The forms of a step with their costs, captured in the layouts that kernels give.

Beside the step as captured there are forms with fused kernels, and with convolutions that read
channels last. Where fusing gains nothing, such as a BERT on a CPU whose ops are fused already, a
plan of single ops may be faster: it has more values to choose from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch

from rockmate._torch.distributed import first_offer
from rockmate._torch.storage import bytes_of
from rockmate._util import begin_stage, gc_paused
from rockmate.capture.memory_format import draws_of, may_read_channels_last, output_layouts
from rockmate.costs.cost import Cost, Costs, Link
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.layout_check import captured_in_kernel_layouts, check_traced
from rockmate.costs.machine import Machine
from rockmate.costs.measure import measure_costs
from rockmate.errors import InvalidSampleError, MissingCompilerError, UnsupportedModelError
from rockmate.graph.ir import Graph
from rockmate.graph.step_options import StepOptions
from rockmate.offload.link import link_to
from rockmate.offload.request import OffloadRequest
from rockmate.planning.form import Form
from rockmate.planning.options import PlanOptions
from rockmate.step import CapturedStep

logger = logging.getLogger(__name__)

_STAGES = {
    "capture": "capturing the model",
    "costs": "measuring ops",
    "compile": "compiling kernels",
    "solve": "planning",
}
FurtherForms = Callable[[CapturedStep], list[CapturedStep]]
"""For a captured step the further forms of it."""


def costs_from(
    machine: Machine | None, offload: OffloadRequest | None, *, progress: bool
) -> Callable[[Graph], Costs]:
    """What estimates or measures the costs of graphs, each distinct call once.

    Args:
        machine: that costs are estimated for; None measures.
        offload: whether values may move, at rates that belong to the costs.
        progress: as for `Planner`.
    """
    measured: dict[Hashable, Cost] = {}

    @cache
    def link(device: torch.device) -> Link | None:
        return None if offload is None else link_to(offload, machine, device)

    def costs_of(graph: Graph) -> Costs:
        found = link(graph.ops[0].device)
        if machine is not None:
            costs = estimate_costs(graph, machine)
        else:
            costs = measure_costs(graph, progress=progress, known=measured)
        costs = replace(costs, link=found)
        if offload is None or not offload.with_trained:
            return costs
        return _with_gradients_home(costs, graph)

    return costs_of


def _with_gradients_home(costs: Costs, graph: Graph) -> Costs:
    """The same costs where gradients are added up at home: the op that adds them waits."""
    link, first = costs.link, list(costs.first)
    assert link is not None
    for op in graph.ops:
        sent_ms = sum(link.out_ms(bytes_of(node.meta["val"])) for node, _ in op.final_gradients)
        first[op.index] = replace(first[op.index], time_ms=first[op.index].time_ms + sent_ms)
    return replace(costs, first=tuple(first))


@contextmanager
def timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the seconds of a stage to `timings`; garbage collection is paused."""
    begin = time.perf_counter()
    try:
        begin_stage(_STAGES[stage])
        with gc_paused():
            yield
    finally:
        seconds = time.perf_counter() - begin
        timings[stage] = timings.get(stage, 0.0) + seconds
        logger.debug("%s took %.2f s", stage, seconds)


def checked_forms(
    capture: Callable[[], CapturedStep],
    further: FurtherForms,
    form_of: Callable[[CapturedStep], Form],
    timings: dict[str, float],
) -> list[Form]:
    """The step as captured, and the further forms that a plan may have.

    Args:
        capture: captures the step, once more where kernels lay out otherwise than its fakes.
        further: makes further forms of it.
        form_of: finds the costs of a form.
        timings: takes the seconds of "capture" and "costs".
    """

    def checked(step: CapturedStep) -> Form:
        with timed(timings, "costs"):
            try:
                return form_of(step)
            finally:  # a call that passes have replaced is the cause of others' layouts
                check_traced(() if step.absence else step.capture.traced)

    def first() -> Form:
        with timed(timings, "capture"):
            step = capture()
        return checked(step)

    form = captured_in_kernel_layouts(first)
    rest = captured_in_kernel_layouts(lambda: [checked(step) for step in further(form.step)])
    return in_one_format([form, *rest])


def fused_forms(step: CapturedStep, options: PlanOptions) -> list[CapturedStep]:
    """The step with fused kernels; none where there is no compiler, with a line in the log.

    A kernel that is slower than its ops may be worth its memory. So where some are, there is a form
    with them, too.
    """
    try:
        fused = step.fused(progress=options.progress, compile_limit_s=options.compile_limit_s)
    except MissingCompilerError as error:
        logger.warning("kernels are not fused: %s", error)
        return []
    left = fused.options.unfused
    whole = step.fused(unfused=(), compile_limit_s=options.compile_limit_s) if left else fused
    return [fused] if whole.options.unfused == left else [fused, whole]


def other_forms(
    options: PlanOptions,
    step: CapturedStep,
    capture: Callable[[StepOptions], CapturedStep] | None,
    timings: dict[str, float],
) -> list[CapturedStep]:
    """Further forms of a step, with fused kernels.

    Args:
        options: what was asked for.
        step: as captured.
        capture: captures it once more, with other options; None where times are not measured.
        timings: takes the seconds of "compile".
    """
    is_auto = options.kernels == "auto"
    # Code that sees gradients of parameters sees their layout.
    sees_gradients = step.options.hooked or step.options.gradients == "returned"
    if sees_gradients or not may_read_channels_last(step.capture.joint.graph):
        capture = None
    if options.kernels == "eager" or not (is_auto or capture):
        return []
    with timed(timings, "compile"):
        found = fused_forms(step, options) if is_auto else []
        if capture is None or (is_auto and not found):
            return found
        other = _with_channels_last(step, options, capture)
        if other is not None and is_auto:
            found += fused_forms(other, options)
        elif other is not None:
            limit_s = options.compile_limit_s
            found.append(other.fused(progress=options.progress, compile_limit_s=limit_s))
        return found


def _with_channels_last(
    step: CapturedStep, options: PlanOptions, capture: Callable[[StepOptions], CapturedStep]
) -> CapturedStep | None:
    """The form, op by op, with convolutions that read channels last.

    None if more than rounding would differ, with a line in the log.
    """
    try:
        changed = replace(options.step, kernels="eager", memory_format="channels_last")
        other = captured_in_kernel_layouts(lambda: capture(changed))
    except (InvalidSampleError, UnsupportedModelError) as error:
        logger.info("convolutions do not read channels last: %s", error)
        return None
    if draws_of(other.capture.joint.graph) != draws_of(step.capture.joint.graph):
        logger.info("convolutions do not read channels last: other numbers would be drawn")
        return None
    if output_layouts(other.capture) != output_layouts(step.capture):
        logger.info("convolutions do not read channels last: outputs would be laid out otherwise")
        return None
    return other


def in_one_format(forms: Sequence[Form]) -> list[Form]:
    """Of the forms with fused kernels, those in the memory format that is faster unplanned.

    So the same kernels run at every budget. Ranks of a process group take the format of the first.
    """
    fused = [form for form in forms if form.step.options.kernels == "fused"]
    formats = {_format_of(form): form for form in reversed(fused)}
    if len(formats) < 2:
        return [*forms]
    fastest = min(formats, key=lambda each: formats[each].baseline.time_ms)
    agreed = first_offer(f"memory format of {formats['as_given'].text}", fastest)
    return [form for form in forms if form not in fused or _format_of(form) == agreed]


def _format_of(form: Form) -> str:
    return form.step.options.memory_format
