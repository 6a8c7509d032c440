"""Captures insides of frames, plans them, and tries each before it is used."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.sample import read_sample, trace_sample
from rockmate.capture.signature import SampleCall
from rockmate.costs.cost import Cost
from rockmate.costs.layout_check import captured_in_kernel_layouts
from rockmate.costs.measure import measure_costs
from rockmate.errors import UnsupportedModelError
from rockmate.frames.call import Arguments, Call
from rockmate.frames.interiors.checks import EscapedTensors, check_call, check_capture, signature_of
from rockmate.frames.interiors.gradients import (
    casts_of,
    one_gradient_per_reader,
    return_gradients_of_casts,
)
from rockmate.frames.interiors.interior import Interior
from rockmate.frames.interiors.schedules import PlannedSchedules, structure_of
from rockmate.frames.interiors.trial import Layouts, Trial, trained
from rockmate.graph.parameters import owner_names
from rockmate.graph.pass_options import PassOptions
from rockmate.graph.passes import REWRITES, run_passes
from rockmate.graph.step_options import StepOptions
from rockmate.planning.step import CapturedStep, step_of
from rockmate.state.call_state import CallState

_NUM_TIMED = 3
"""Runs of one inside of a structure, beside its trial, since the first runs of code are slow."""
_OPTIONS = StepOptions(differentiable="all", gradients="returned", hooked=())


class Capturing:
    """Captures insides. Costs of ops and schedules of equal structures are shared."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._costs: dict[Hashable, Cost] = {}
        self._by_structure: dict[Hashable, PlannedSchedules] = {}

    def interior(
        self,
        call: Call,
        module: nn.Module,
        arguments: Arguments,
        before: CallState,
        layouts: Layouts,
        autocast: Mapping[str, torch.dtype],
    ) -> Interior:
        """The inside of a call that has run, tried with some layouts of its outputs' gradients.

        The call has the state that it began in, `before` what it may have changed. The autocast is
        that of its backwards.

        Raises:
            UnsupportedModelError: it would not be as in eager. Other errors of captures, too.
        """
        check_call(call, module, before)
        given = {"layouts": [each[0] for each in layouts], "autocast": autocast}
        run = partial(trained, call, module, clock=self._clock, **given)
        outside = EscapedTensors()
        eager = run(outside(arguments.forward))
        if outside.found():
            raise UnsupportedModelError(outside.found())

        def planned_step() -> tuple[CapturedStep, PlannedSchedules]:
            with call.again():  # buffers of its own: autograd holds the present ones
                step = _captured(module, arguments, eager)
            return step, self._planned(step)

        step, planned = captured_in_kernel_layouts(planned_step)
        names = tuple(casts_of(step.capture))
        interior = Interior(call.key.path, step, module, planned, layouts, names)
        run = partial(run, cast_names=names)
        first, last = _forward_of(interior, 0), _forward_of(interior, len(planned.costs) - 1)
        was_tried = planned.was_tried
        for number in range(max(1, *map(len, layouts))):
            tried = [each[min(number, len(each) - 1)] for each in layouts]
            runs = [run(each, layouts=tried) for each in (arguments.forward, first, last)]
            for ours in runs[1:]:
                if difference := runs[0].difference(ours):
                    msg = f"its {difference} would not be eager's bit for bit"
                    raise UnsupportedModelError(msg)
            planned.take(eager_s=runs[0].seconds, fastest_s=runs[1].seconds)
        for _ in range(0 if was_tried else _NUM_TIMED):  # in turn
            planned.take(eager_s=run(arguments.forward).seconds, fastest_s=run(first).seconds)
        return interior

    def _planned(self, step: CapturedStep) -> PlannedSchedules:
        structure = structure_of(step.graph)
        found = self._by_structure.get(structure)
        if found is None:
            costs = measure_costs(step.graph, known=self._costs)
            found = self._by_structure[structure] = PlannedSchedules(step, costs)
        return found


def _forward_of(interior: Interior, number: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors, _ = signature_of(Arguments(forward, args, kwargs))
        return interior.run(number, tensors)

    return forward


def _captured(module: nn.Module, arguments: Arguments, eager: Trial) -> CapturedStep:
    """The inside of a call, with a gradient for each reader of a tensor."""
    sample = read_sample(module, SampleCall(arguments.args, arguments.kwargs), None)
    capture = trace_sample(
        module, sample, differentiable="all", outputs="all", untraced=(), keeps_strides=True
    )
    check_capture(capture)
    return_gradients_of_casts(module, capture)
    strides = {
        role.index: node.meta["val"].stride()
        for node, role in capture.inputs
        if role.kind is RoleKind.INPUT
    }
    if any(strides[index] != each.stride() for index, each in enumerate(sample.tensors)):
        msg = "elements of an argument share memory"
        raise UnsupportedModelError(msg)
    counts = dict(zip(_leaves(module, sample.tensors), map(len, eager.contributions), strict=True))
    apart = one_gradient_per_reader(capture, counts)
    if apart is None:
        msg = "the order in which gradients are added up is not that of its graph"
        raise UnsupportedModelError(msg)
    passes = PassOptions(owner_of=owner_names(module), keeps_inputs=True)
    capture = run_passes(REWRITES, apart, passes)
    return step_of(capture, module, sample.call, ModelSignature.of(module), _OPTIONS)


def _leaves(module: nn.Module, tensors: Sequence[torch.Tensor]) -> list[Role]:
    """The roles of gradients of arguments and parameters, in the order of a trial's leaves."""
    given = [
        Role(RoleKind.INPUT_GRADIENT, index=index)
        for index, each in enumerate(tensors)
        if each.requires_grad
    ]
    named = module.named_parameters()
    trained_ones = [name for name, each in named if each.requires_grad]
    return [*given, *(Role(RoleKind.PARAMETER_GRADIENT, name=name) for name in trained_ones)]
