"""The inside of a frame, captured: each call runs one of its schedules as one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import cached_cast
from rockmate.capture.huggingface import switches_of
from rockmate.capture.model_signature import ModelSignature, ModelWatch
from rockmate.errors import BackwardError
from rockmate.frames.interiors.checks import has_hooks
from rockmate.frames.interiors.schedules import PlannedSchedules
from rockmate.frames.interiors.trial import Layouts
from rockmate.frames.needs import ScheduleCost
from rockmate.graph.parameters import Binding, owner_names
from rockmate.planning.step import CapturedStep
from rockmate.runtime.autograd import Runner
from rockmate.runtime.emit import emit
from rockmate.schedule.schedule import Schedule
from rockmate.state.tensors import layout_of


class Interior:
    """The inside of the calls of one submodule, for arguments of one signature.

    Attributes:
        copies_gradients: whether gradients of outputs do not lie in memory as the outputs do, and
            are copied.
        adds_gradients: whether a parameter may have another gradient in the same step, to which
            autograd adds that of a call.
    """

    def __init__(
        self,
        path: str,
        step: CapturedStep,
        module: nn.Module,
        planned: PlannedSchedules,
        layouts: Layouts,
        cast_names: Sequence[str],
    ) -> None:
        """Writes no code yet. Layouts are of the gradients of each output in the trial.

        Gradients of parameters of `cast_names` are those of the casts that autocast keeps.
        """
        self.copies_gradients = self.adds_gradients = False
        self._layouts = layouts
        self._path, self._step, self._module, self._planned = path, step, module, planned
        self._cast_names = frozenset(cast_names)
        self._runners: dict[int, Runner] = {}
        self._watch = ModelWatch(module, step.capture.attributes)
        self._watched_modules, self._forward = list(module.modules()), module.forward
        switches = switches_of(module)
        self._switches = [(owner, name, getattr(owner, name)) for owner, name in switches]

    @cached_property
    def schedules(self) -> Sequence[ScheduleCost]:
        """How it can run, of rising seconds, with the bytes that they take where it is."""
        copies, adds = self.copies_gradients, self.adds_gradients
        return [each.within(copies=copies, adds=adds) for each in self._planned.costs]

    def is_present(self, forward: Callable[..., Any]) -> bool:
        """Whether submodule, forwards, and the attributes that they read are as they were."""
        if forward != self._forward:
            return False
        if any(getattr(owner, name, None) != value for owner, name, value in self._switches):
            return False
        if has_hooks(self._watched_modules):
            return False
        if not self._watch.has_changed():
            return True
        attributes = self._step.capture.attributes
        now = ModelSignature.of(self._module)
        if self._step.state.difference(now) or attributes.difference():
            return False
        self._watch = ModelWatch(self._module, attributes)
        return True

    def run(self, number: int, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of a call."""
        runner = self._runners.get(number)
        if runner is None:
            runner = self._runners[number] = self._new_runner(self._planned.schedules[number])
        outputs = list(runner.run(tensors))
        return self._step.capture.output_structure.rebuild(outputs)

    def _new_runner(self, schedule: Schedule) -> Runner:
        program = emit(self._step.graph, schedule, owner_names(self._module))
        runner = Runner(
            program,
            self._module,
            name=self._path,
            way_out=f", or plan no frames (plan_frames=False), or leave it: keep={[self._path]!r}",
        )
        runner.check_tangents = self._check_tangents
        runner.returned_to = partial(self._returned_to, runner.binding)
        return runner

    def _returned_to(self, binding: Binding, name: str) -> torch.Tensor:
        owner = binding[name]
        return cached_cast(owner) if name in self._cast_names else owner

    def _check_tangents(self, tangents: Sequence[torch.Tensor | None]) -> None:
        for place, each in enumerate(tangents):
            if each is not None and layout_of(each) not in self._layouts[place]:
                msg = (
                    f"the gradient of an output of {self._path} has strides {list(each.stride())}, "
                    "others than in steps before: another loss, perhaps. Its planned backward "
                    f"would round otherwise than eager's. Leave it whole: keep={[self._path]!r}, "
                    "or call the plain model for such a step."
                )
                raise BackwardError(msg)
