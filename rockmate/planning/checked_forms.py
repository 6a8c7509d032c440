"""The forms of a step with their costs, captured in the layouts that kernels give.

Beside the step as captured there are forms with fused kernels. Where fusing gains nothing, such as
a BERT on a CPU whose ops are fused already, a plan of single ops may be faster: it has more values
to choose from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from rockmate._torch.storage import bytes_of
from rockmate._util import begin_stage, gc_paused
from rockmate.costs.cost import Cost, Costs, Link
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.layout_check import captured_in_kernel_layouts, check_traced
from rockmate.costs.machine import Machine
from rockmate.costs.measure import measure_costs
from rockmate.errors import MissingCompilerError
from rockmate.graph.ir import Graph
from rockmate.offload.link import link_to
from rockmate.planning.form import Form
from rockmate.planning.options import PlanOptions
from rockmate.planning.step import CapturedStep
from rockmate.schedule.offload_request import OffloadRequest

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
        if machine is not None:
            costs = estimate_costs(graph, machine)
        else:
            costs = measure_costs(graph, progress=progress, known=measured)
        costs = replace(costs, link=link(graph.ops[0].device))
        is_home = offload is not None and offload.with_trained
        return _with_gradients_home(costs, graph) if is_home else costs

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
    further: FurtherForms | None,
    form_of: Callable[[CapturedStep], Form],
    timings: dict[str, float],
) -> list[Form]:
    """The step as captured, and the further forms that a plan may have.

    Args:
        capture: captures the step, once more where kernels lay out otherwise than its fakes.
        further: compiles further forms of it; None for none.
        form_of: finds the costs of a form.
        timings: takes the seconds of "capture", "costs" and "compile".
    """

    def checked(step: CapturedStep) -> Form:
        with timed(timings, "costs"):
            try:
                return form_of(step)
            finally:  # a call that passes have replaced is the cause of others' layouts
                check_traced(() if step.absence else step.capture.traced)

    def forms() -> list[Form]:
        with timed(timings, "capture"):
            step = capture()
        first = checked(step)
        if further is None:
            return [first]
        with timed(timings, "compile"):
            others = further(step)
        return [first, *map(checked, others)]

    return captured_in_kernel_layouts(forms)


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


def advise_format(step: CapturedStep) -> None:
    """Says in the log that convolutions of contiguous images may be faster channels last."""
    convolution = torch.ops.aten.convolution.default
    calls = step.capture.joint.graph.find_nodes(op="call_function", target=convolution)
    images: list[Any] = [call.args[0].meta["val"] for call in calls]
    if any(image.ndim == 4 and image.is_contiguous() for image in images):
        logger.info(
            "convolutions are often faster on values whose channels are last in memory; for the "
            "model and its images write .to(memory_format=torch.channels_last)"
        )
