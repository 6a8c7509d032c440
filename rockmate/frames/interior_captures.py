"""When insides of frames are captured, and for which steps.

A capture and its trial take memory beside a step. So a step in which insides are captured holds
nothing, and it has to be possible to allocate the whole budget. It is one whose inputs have shapes
that have come before, since each shape is captured by itself, and shapes that come once are not
worth it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate.frames.call import Arguments, Call
from rockmate.frames.interiors.captured import Interiors
from rockmate.frames.interiors.interior import Interior
from rockmate.frames.needs import MOST_PLANNED, StepNeeds
from rockmate.frames.schedule_cost import GradientContext
from rockmate.state.tensors import layout_of, tensors_in

logger = logging.getLogger(__name__)

_MOST_STEPS = 3
"""Of one shape, that capture: a frame may seldom come, as LayerDrop leaves it out."""
_MOST_SHAPES = 8
"""Of which insides are captured."""
_REMEMBERED = 64
"""Shapes that are known to have come."""


@dataclass(slots=True)
class _Shape:
    """What is known for steps whose inputs have the same shapes.

    Attributes:
        number: of those that were captured, from 1; 0 before.
        num_left: steps that may capture.
        paths: of frames that have come in such steps.
        found: insides, by the paths of frames.
    """

    number: int = 0
    num_left: int = _MOST_STEPS
    paths: set[str] = field(default_factory=set)
    found: defaultdict[str, list[Interior]] = field(default_factory=lambda: defaultdict(list))


class InteriorCaptures:
    """What is known of insides, and what is still to be captured."""

    def __init__(self, clock: Callable[[], float], model: nn.Module) -> None:
        """Nothing yet.

        Args:
            clock: seconds.
            model: whose submodules are frames.
        """
        self._interiors, self._model = Interiors(clock), model
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._present = _Shape()
        self._num_captured = 0
        self._around: defaultdict[str, GradientContext] = defaultdict(GradientContext)  # by path
        self._tied: frozenset[int] = frozenset()  # parameters that have several names

    def note_step(self, shapes: Hashable) -> None:
        """A step is measured, whose inputs have these shapes."""
        self._present = self._shapes.setdefault(shapes, _Shape())
        self._shapes.move_to_end(shapes)
        while len(self._shapes) > _REMEMBERED:
            self._shapes.popitem(last=False)

    def begin_step(
        self, shapes: Hashable, needs: StepNeeds, scale: float, *, is_short: bool
    ) -> bool:
        """Whether the step that begins is to capture. If not, its needs get the schedules.

        Args:
            shapes: of its inputs.
            needs: of a measured step.
            scale: size of the step relative to that one.
            is_short: whether the budget cannot be allocated.
        """
        if len(needs.by_key) > MOST_PLANNED:
            needs.set_schedules(0, {})
            return False
        is_new = shapes not in self._shapes
        self.note_step(shapes)
        shape = self._present
        if is_new or (not is_short and self._is_due(shape, needs)):
            needs.set_schedules(0, {})
            return not is_new
        if needs.schedules_number == shape.number:
            return False
        schedules = {}
        for path, interiors in shape.found.items():
            for each in interiors:
                each.expect(self._around[path])
            if _is_confirmed(interiors):
                schedules[path] = interiors[-1].schedules
        needs.set_schedules(shape.number, schedules, scale)
        return False

    def _is_due(self, shape: _Shape, needs: StepNeeds) -> bool:
        """Whether a step of a shape that has come before is to capture."""
        unconfirmed = {path for path, found in shape.found.items() if not _is_confirmed(found)}
        if {key.path for key in needs.by_key} <= shape.paths - unconfirmed:
            shape.num_left = 0
        if not shape.num_left or (not shape.number and self._num_captured == _MOST_SHAPES):
            return False
        if not shape.number:
            self._num_captured += 1
            shape.number = self._num_captured
        shape.num_left -= 1
        named = self._model.named_parameters(remove_duplicate=False)
        num_names = Counter(id(each) for _, each in named)
        self._tied = frozenset(each for each, number in num_names.items() if number > 1)
        return True

    def watch(self, module: nn.Module, arguments: Arguments) -> None:
        """A call begins whose inside is to be captured."""
        self._interiors.watch(module, arguments)

    def take(self, call: Call, module: nn.Module, arguments: Arguments, output: Any) -> None:
        """Captures the inside of a call.

        Args:
            call: which has run.
            module: the submodule.
            arguments: of the call.
            output: of it.
        """
        path = call.key.path
        self._present.paths.add(path)
        found = None
        if any(map(vars, tensors_in(output))):
            logger.info("%s is not planned: its output has attributes that Python sets", path)
        else:
            self._interiors.learn(call, module, arguments)
            found = self._interiors.find(path, arguments)
        if found is None:
            self._present.found.pop(path, None)
            return
        interior, interiors = found[0], self._present.found[path]
        if interior not in interiors:
            interiors.append(interior)
        if call.key.number or any(id(each) in self._tied for each in module.parameters()):
            self._expect(path, adds_gradients=True)
        note = partial(self._note_gradient, path, interior, interiors)
        for place, each in enumerate(tensors_in(output)):
            if each.grad_fn is not None:
                each.register_hook(partial(note, place, layout_of(each)))

    def _note_gradient(
        self,
        path: str,
        interior: Interior,
        interiors: list[Interior],
        place: int,
        layout: Sequence[int],
        gradient: torch.Tensor,
    ) -> None:
        """The gradient of an output has come.

        Kernels round otherwise for another layout. So one that was not tried ends the use of the
        inside, which is then captured again and tried with it.
        """
        if layout_of(gradient) != layout:
            self._expect(path, copies_gradients=True)
        if not interior.confirm(place, gradient) and interior in interiors:
            interiors.remove(interior)

    def _expect(self, path: str, **changed: bool) -> None:
        self._around[path] = replace(self._around[path], **changed)

    def find(
        self, path: str, arguments: Arguments
    ) -> tuple[Interior, Sequence[torch.Tensor]] | None:
        """See `Interiors.find`; None, too, as long as no backward has confirmed it."""
        found = self._interiors.find(path, arguments)
        return None if found is None or not found[0].is_confirmed else found


def _is_confirmed(interiors: Sequence[Interior]) -> bool:
    return bool(interiors) and interiors[-1].is_confirmed
