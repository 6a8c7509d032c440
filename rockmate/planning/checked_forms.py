"""The forms of a step with their costs, captured in the layouts that kernels give."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache

import torch

from rockmate.costs.cost import Cost, Costs
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.layout_check import captured_in_kernel_layouts, check_traced
from rockmate.costs.link import Link
from rockmate.costs.machine import Machine
from rockmate.costs.measure import measure_costs
from rockmate.graph.ir import Graph
from rockmate.offload.link import link_to
from rockmate.offload.request import OffloadRequest
from rockmate.planning.form import Form
from rockmate.planning.further_forms import in_one_format
from rockmate.planning.stage import timed
from rockmate.step import CapturedStep

FurtherForms = Callable[[CapturedStep], Callable[[], list[CapturedStep]] | None]
"""For a captured step what makes further forms of it; None if there are none."""


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
            return replace(estimate_costs(graph, machine), link=found)
        return replace(measure_costs(graph, progress=progress, known=measured), link=found)

    return costs_of


def checked_forms(
    capture: Callable[[], CapturedStep],
    further: FurtherForms,
    form_of: Callable[[CapturedStep], Form],
    timings: dict[str, float],
) -> list[Form]:
    """The step as captured, and the further forms that a plan may have.

    Args:
        capture: captures the step, once more where kernels lay out otherwise than its fakes.
        further: what makes further forms of it.
        form_of: finds the costs of a form.
        timings: takes the seconds of "capture", "compile" and "costs".
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
    others = further(form.step)
    if others is None:
        return [form]

    def rest() -> list[Form]:
        with timed(timings, "compile"):
            steps = others()
        return [checked(step) for step in steps]

    return in_one_format([form, *captured_in_kernel_layouts(rest)])
