"""Captures insides of frames, plans them, and tries each before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate.capture.huggingface import is_cache
from rockmate.capture.model_signature import ModelSignature
from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.sample import read_sample, trace_sample
from rockmate.capture.signature import SampleCall
from rockmate.costs.cost import Cost
from rockmate.costs.layout_check import captured_in_kernel_layouts
from rockmate.costs.measure import measure_costs
from rockmate.errors import RockmateError, UnsupportedModelError
from rockmate.frames.call import Arguments, Call
from rockmate.frames.interiors.casts import cast_names, return_gradients_of_casts
from rockmate.frames.interiors.checks import (
    EscapedTensors,
    check_capture,
    check_effects,
    check_module,
    share_no_memory,
    signature_of,
)
from rockmate.frames.interiors.gradient_layouts import GradientLayouts
from rockmate.frames.interiors.interior import Interior
from rockmate.frames.interiors.readers import one_gradient_per_reader
from rockmate.frames.interiors.schedules import PlannedSchedules, structure_of
from rockmate.frames.interiors.trial import Trial, trained
from rockmate.graph.parameters import owner_names
from rockmate.graph.passes import REWRITES, PassOptions, run_passes
from rockmate.graph.step_options import StepOptions
from rockmate.state.call_state import CallState
from rockmate.step import CapturedStep, step_of

logger = logging.getLogger(__name__)

_MOST_SIGNATURES = 8
"""Of one submodule: each is captured and planned by itself."""
_NUM_TIMED = 3
"""Runs of one inside of a structure, beside its trial, since the first runs of code are slow."""
_OPTIONS = StepOptions(differentiable="all", gradients="returned", hooked=())


class Interiors:
    """The insides of the frames of one model."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """None yet.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._known: dict[str, dict[Hashable, Interior | None]] = {}
        self._has_told_of_cache = False
        self._before: CallState | None = None
        self._costs: dict[Hashable, Cost] = {}
        self._layouts: dict[tuple[str, Hashable], GradientLayouts] = {}
        self._by_structure: dict[Hashable, PlannedSchedules] = {}

    def find(
        self, path: str, arguments: Arguments
    ) -> tuple[Interior, Sequence[torch.Tensor]] | None:
        """The inside of a call and the tensors of its arguments.

        None if it is not captured, or the submodule is not as it was.
        """
        known = self._known.get(path)
        if not known:
            return None
        try:
            tensors, signature = signature_of(arguments)
        except RockmateError:
            return None
        interior = known.get(signature)
        if (
            interior is None
            or not share_no_memory(tensors)
            or not interior.is_present(arguments.forward)
        ):
            return None
        if any(map(vars, tensors)):  # attributes, which the inside may read
            return None
        return interior, tensors

    def watch(self, module: nn.Module, arguments: Arguments) -> None:
        """A call begins whose inside is to be captured."""
        self._before = CallState(module, arguments.args, arguments.kwargs)

    def learn(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """Captures the inside of a call, if it can be.

        Args:
            call: which, with the state that it began in.
            module: the submodule.
            arguments: of the call.
        """
        known = self._known.setdefault(call.key.path, {})
        if any(map(is_cache, (*arguments.args, *arguments.kwargs.values()))):
            if not self._has_told_of_cache:
                self._has_told_of_cache = True
                logger.warning(
                    "frames of %s and others run as in eager, slower than planned ones, since the "
                    "model gives them its key/value cache, which training does not need: "
                    "model.config.use_cache = False", call.key.path,
                )  # fmt: skip
            return
        try:
            tensors, signature = signature_of(arguments)
            layouts = self._layouts.setdefault((call.key.path, signature), GradientLayouts())
            if signature in known and not layouts.has_changed:
                return
            if len(known) - (signature in known) >= _MOST_SIGNATURES or not share_no_memory(
                tensors
            ):
                return
            known[signature] = None
            known[signature] = self._captured_interior(call, module, arguments, layouts)
        except Exception as error:  # noqa: BLE001 - whatever it is, the frame runs as in eager
            logger.info("%s is not planned, and runs as in eager: %s", call.key.path, error)

    def _captured_interior(
        self, call: Call, module: nn.Module, arguments: Arguments, layouts: GradientLayouts
    ) -> Interior:
        assert self._before is not None
        check_module(module)
        check_effects(call, self._before)
        run = partial(trained, call, module, clock=self._clock, layouts=layouts)
        outside = EscapedTensors()
        eager = run(_watched(arguments.forward, outside))
        if outside.found():
            raise UnsupportedModelError(outside.found())

        def planned_step() -> tuple[CapturedStep, PlannedSchedules]:
            with call.again():  # buffers of its own: autograd holds the present ones
                step = _captured(module, arguments, eager)
            return step, self._planned(step)

        step, planned = captured_in_kernel_layouts(planned_step)
        names = cast_names(module, step.capture)
        interior = Interior(call.key.path, step, module, planned, layouts, names)
        if names:
            run = partial(run, cast_names=names)
            eager = run(arguments.forward)
        first, last = _forward_of(interior, 0), _forward_of(interior, len(planned.costs) - 1)
        was_tried = planned.was_tried
        trials = [run(each) for each in (first, last)]
        _check_bits(eager, trials)
        for number in range(1, layouts.number):
            others = [run(each, number=number) for each in (arguments.forward, first, last)]
            _check_bits(others[0], others[1:])
        planned.take(eager_s=eager.seconds, fastest_s=trials[0].seconds)
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


def _check_bits(eager: Trial, trials: Sequence[Trial]) -> None:
    difference = next(filter(None, map(eager.difference, trials)), None)
    if difference:
        msg = f"its {difference} would not be eager's bit for bit"
        raise UnsupportedModelError(msg)


def _forward_of(interior: Interior, number: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors, _ = signature_of(Arguments(forward, args, kwargs))
        return interior.run(number, tensors)

    return forward


def _watched(forward: Callable[..., Any], outside: EscapedTensors) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with outside:
            return forward(*args, **kwargs)

    return watched


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
