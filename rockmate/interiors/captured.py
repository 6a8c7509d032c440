"""Captures insides of frames, plans them, and tries each before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate._torch.members import all_forward_hooks, has_tensor_hooks
from rockmate._torch.pytree import tree_leaves
from rockmate.capture.huggingface import is_recording
from rockmate.capture.model_signature import ModelSignature, acting_hooks
from rockmate.capture.roles import Capture, Role, RoleKind
from rockmate.capture.sample import read_sample, trace_sample
from rockmate.capture.signature import SampleCall
from rockmate.costs.cost import Cost
from rockmate.costs.measure import measure_costs
from rockmate.errors import RockmateError, UnsupportedModelError
from rockmate.frames.call import Arguments, Call
from rockmate.graph.parameters import owner_names
from rockmate.graph.passes import REWRITES, PassOptions, run_passes
from rockmate.interiors.interior import CapturedInterior, signature_of
from rockmate.interiors.outer_values import OuterValues
from rockmate.interiors.outside import LeftOutside
from rockmate.interiors.readers import one_gradient_per_reader
from rockmate.interiors.trial import Trial, trained
from rockmate.interiors.ways import PlannedWays, structure_of
from rockmate.runtime.model_checks import check_model
from rockmate.step import CapturedStep, step_of

logger = logging.getLogger(__name__)

_MOST_SIGNATURES = 8
"""Of one submodule: each is captured and planned by itself."""
_NUM_TIMED = 3
"""Runs of one inside of a structure, beside its trial, since the first runs of code are slow."""
_OPTIONS = {"differentiable": "all", "outputs": "all", "gradients": "returned"}


class CapturedInteriors:
    """The insides of the frames of one model."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """None yet.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._known: dict[str, dict[Hashable, CapturedInterior | None]] = {}
        self._seen: set[tuple[str, Hashable]] = set()
        self._costs: dict[Hashable, Cost] = {}
        self._by_structure: dict[Hashable, PlannedWays] = {}

    def find(
        self, path: str, arguments: Arguments
    ) -> tuple[CapturedInterior, Sequence[torch.Tensor]] | None:
        """See `rockmate.frames.interior.Interiors`."""
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
            or not _are_apart(tensors)
            or not interior.is_present(arguments.forward)
        ):
            return None
        return interior, tensors

    def note(self, path: str, arguments: Arguments) -> None:
        """See `rockmate.frames.interior.Interiors`."""
        with suppress(RockmateError):
            self._seen.add((path, signature_of(arguments)[1]))

    def learn(self, call: Call, module: nn.Module, arguments: Arguments) -> None:
        """See `rockmate.frames.interior.Interiors`."""
        known = self._known.setdefault(call.key.path, {})
        try:
            _check_arguments(call, arguments)
            tensors, signature = signature_of(arguments)
            is_new = (call.key.path, signature) not in self._seen
            self._seen.add((call.key.path, signature))
            if is_new or signature in known or len(known) >= _MOST_SIGNATURES:
                return
            if not _are_apart(tensors):
                return
            known[signature] = None
            known[signature] = self._learned(call, module, arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the frame runs as in eager
            logger.info("%s is not planned, and runs as in eager: %s", call.key.path, error)

    def _learned(self, call: Call, module: nn.Module, arguments: Arguments) -> CapturedInterior:
        _check(call, module)
        outer = OuterValues(module)
        outer_values = outer.now()
        run = partial(trained, call, module, clock=self._clock)
        outside = LeftOutside()
        eager = run(_watched(arguments.forward, outside))
        if outer.now() != outer_values:
            msg = "it changes a global variable"
            raise UnsupportedModelError(msg)
        if outside.found():
            raise UnsupportedModelError(outside.found())
        with call.again():  # buffers of its own: autograd holds the present ones
            step = _captured(module, arguments, eager)
        planned = self._planned(step)
        interior = CapturedInterior(call.key.path, step, module, planned, outer)
        first, last = _forward_of(interior, 0), _forward_of(interior, len(planned.ways) - 1)
        was_tried = planned.was_tried
        trials = [run(each) for each in (first, last)]
        difference = next(filter(None, map(eager.difference, trials)), None)
        if difference:
            msg = f"its {difference} would not be eager's bit for bit"
            raise UnsupportedModelError(msg)
        planned.take(eager_s=eager.seconds, fastest_s=trials[0].seconds)
        for _ in range(0 if was_tried else _NUM_TIMED):  # in turn
            planned.take(eager_s=run(arguments.forward).seconds, fastest_s=run(first).seconds)
        return interior

    def _planned(self, step: CapturedStep) -> PlannedWays:
        structure = structure_of(step.graph)
        found = self._by_structure.get(structure)
        if found is None:
            costs = measure_costs(step.graph, known=self._costs)
            found = self._by_structure[structure] = PlannedWays(step, costs)
        return found


def _forward_of(interior: CapturedInterior, number: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors, _ = signature_of(Arguments(forward, args, kwargs))
        return interior.run(number, tensors)

    return forward


def _watched(forward: Callable[..., Any], outside: LeftOutside) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with outside:
            return forward(*args, **kwargs)

    return watched


def _are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no argument with a gradient comes twice, nor is a parameter."""
    trained_ones = [each for each in tensors if each.requires_grad]
    ids = {id(each) for each in trained_ones}
    return len(ids) == len(trained_ones) and not any(
        isinstance(each, nn.Parameter) for each in trained_ones
    )


def _check_arguments(call: Call, arguments: Arguments) -> None:
    given, signature = signature_of(call.as_given())
    present, signature_after = signature_of(arguments)
    if signature != signature_after or list(map(id, given)) != list(map(id, present)):
        msg = "it changes a list or dictionary that it is given"
        raise UnsupportedModelError(msg)
    if any(map(is_dataclass, tree_leaves(arguments[1:]))):
        msg = "it is given a dataclass, which it may change"
        raise UnsupportedModelError(msg)


def _check(call: Call, module: nn.Module) -> None:
    if call.cannot_repeat:
        msg = "it changes its input, or a buffer, in place"
        raise UnsupportedModelError(msg)
    hooks = all_forward_hooks if is_recording() else acting_hooks
    if any(map(hooks, module.modules())):
        msg = "it, or a submodule of it, has hooks"
        raise UnsupportedModelError(msg)
    parameters = list(module.named_parameters(remove_duplicate=False))
    if len({id(each) for _, each in parameters}) < len(parameters):
        msg = "it has one parameter under several names"
        raise UnsupportedModelError(msg)
    if any(has_tensor_hooks(each) for _, each in parameters):
        msg = "a parameter of it has a hook"
        raise UnsupportedModelError(msg)
    check_model(module, (), None)


def _captured(module: nn.Module, arguments: Arguments, eager: Trial) -> CapturedStep:
    """The inside of a call, with a gradient for each reader of a tensor."""
    sample = read_sample(module, SampleCall(arguments.args, arguments.kwargs), None)
    capture = trace_sample(
        module, sample, differentiable="all", outputs="all", untraced=(), keeps_strides=True
    )
    _check_capture(capture)
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


def _check_capture(capture: Capture) -> None:
    if capture.attributes.leaves_any or capture.read_values.check is not None:
        msg = "it assigns attributes, or reads the values of tensors"
        raise UnsupportedModelError(msg)
    if capture.num_checkpoints or capture.non_differentiable_outputs:
        msg = "it has checkpoints of its own, or outputs without a gradient"
        raise UnsupportedModelError(msg)


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
