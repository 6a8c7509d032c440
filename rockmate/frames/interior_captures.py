"""When insides of frames are captured, and which call runs one.

A capture and its trial take memory beside a step. So a step in which insides are captured holds
nothing, and it has to be possible to allocate the whole budget. It is one whose inputs have shapes
that have come before, since each shape is captured by itself, and shapes that come once are not
worth it. Gradients of a frame's outputs have come before, too: kernels round by their strides, so
the trial has gradients that lie in memory as those do.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate._torch.members import hooks_within, modules_within
from rockmate.capture.huggingface import is_cache
from rockmate.errors import RockmateError, UnsupportedModelError
from rockmate.frames.call import Arguments, Call
from rockmate.frames.interiors.captured import Capturing
from rockmate.frames.interiors.checks import share_no_memory, signature_of
from rockmate.frames.interiors.interior import Interior
from rockmate.frames.interiors.trial import GradientLayouts
from rockmate.frames.needs import MOST_PLANNED, FrameKey, StepNeeds
from rockmate.state.call_state import CallState, outside_of
from rockmate.state.tensors import layout_of, tensors_in

logger = logging.getLogger("rockmate.frames.interiors")

_NOT_PLANNED = "%s is not planned, and runs as in eager: %s"

_MOST_STEPS = 8
"""Of one shape, that capture: a frame may seldom come, as LayerDrop leaves it out."""
_MOST_SHAPES = 8
"""Of which insides are captured."""
_REMEMBERED = 64
"""Shapes that are known to have come."""
_MOST_SIGNATURES = 8
"""Of one submodule: each is captured and planned by itself."""


@dataclass(slots=True)
class _Shape:
    """What is known for steps whose inputs have the same shapes.

    Attributes:
        number: of those that were captured, from 1; 0 before.
        num_left: steps that may capture.
        paths: of frames of which nothing is left to be captured.
        found: insides, by the paths of frames.
    """

    number: int = 0
    num_left: int = _MOST_STEPS
    paths: set[str] = field(default_factory=set)
    found: dict[str, Interior] = field(default_factory=dict)


class InteriorCaptures:
    """What is known of insides, and what is still to be captured."""

    def __init__(
        self,
        clock: Callable[[], float],
        model: nn.Module,
        note_capture: Callable[[FrameKey, list[torch.Tensor]], None],
    ) -> None:
        """None is known; for `note_capture`, see `PeakCheck`."""
        self._capturing, self._model, self._note_capture = Capturing(clock), model, note_capture
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()
        self._present, self._is_noting = _Shape(), False
        self._num_captured = 0
        self._known: defaultdict[str, dict[Hashable, Interior | None]] = defaultdict(dict)
        self._layouts: defaultdict[str, GradientLayouts] = defaultdict(GradientLayouts)
        self._repeated: set[str] = set()  # paths whose parameters may get several gradients
        self._before: CallState | None = None
        self._signature: Hashable = None
        self._has_told_of_cache = False

    # --- steps ------------------------------------------------------------------------------------

    def note_step(self, shapes: Hashable) -> None:
        """A step runs as in eager, whose inputs have these shapes: its gradients are noted."""
        self._present, self._is_noting = self._shapes.setdefault(shapes, _Shape()), True
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
        is_due = not (is_new or is_short) and self._is_due(shape, needs)
        self._is_noting = is_new or is_due
        schedules = {path: each.schedules for path, each in shape.found.items()}
        needs.set_schedules(0 if self._is_noting else shape.number, schedules, scale)
        return is_due

    def _is_due(self, shape: _Shape, needs: StepNeeds) -> bool:
        """Whether a step of a shape that has come before is to capture."""
        if {key.path for key in needs.by_key} <= shape.paths:
            shape.num_left = 0
        if not shape.num_left or (not shape.number and self._num_captured == _MOST_SHAPES):
            return False
        if not shape.number:
            self._num_captured += 1
            shape.number = self._num_captured
        shape.num_left -= 1
        named = self._model.named_parameters(remove_duplicate=False)
        num_names = Counter(id(each) for _, each in named)
        self._repeated = {
            path
            for path in {key.path for key in needs.by_key}
            if FrameKey(path, 1) in needs.by_key
            or any(num_names[id(each)] > 1 for each in self._model.get_submodule(path).parameters())
        }
        return True

    # --- calls ------------------------------------------------------------------------------------

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
        if interior is None or not share_no_memory(tensors):
            return None
        # Attributes of tensors may be read by the inside.
        if any(map(vars, tensors)) or not interior.is_present(arguments.forward):
            return None
        return interior, tensors

    def watch(self, path: str, module: nn.Module, arguments: Arguments) -> None:
        """A call begins whose inside is to be captured, unless that was tried before."""
        self._before, known = None, self._known[path]
        if any(map(is_cache, (*arguments.args, *arguments.kwargs.values()))):
            if not self._has_told_of_cache:
                self._has_told_of_cache = True
                logger.warning(
                    "frames of %s and others run as in eager, slower than planned ones, since the "
                    "model gives them its key/value cache, which training does not need: "
                    "model.config.use_cache = False", path,
                )  # fmt: skip
            return
        try:
            tensors, self._signature = signature_of(arguments)
        except RockmateError as error:
            logger.info(_NOT_PLANNED, path, error)
            return
        is_new = self._signature not in known and len(known) < _MOST_SIGNATURES
        if is_new and share_no_memory(tensors):
            self._before = CallState(module, arguments.args, arguments.kwargs)

    def take(self, call: Call, module: nn.Module, arguments: Arguments, output: Any) -> None:
        """Captures the inside of a call, if it can be; the call has run from the state in it."""
        path, shape = call.key.path, self._present
        known, layouts = self._known[path], self._layouts[path]
        if not layouts.are_known(output):
            return  # no backward of it has come
        shape.paths.add(path)
        if self._before is not None:
            known[self._signature] = None
            modules = modules_within(module)  # a trial runs a backward, whose hooks may write
            outside = outside_of(modules, hooks_within(modules))
            outputs = tensors_in(output)
            self._note_capture(call.key, [*module.parameters(), *call.inputs, *outputs, *outputs])
            try:
                if any(map(vars, outputs)):
                    msg = "its output has attributes that Python sets"
                    raise UnsupportedModelError(msg)
                tried = self._before, layouts.for_trial(output), layouts.autocast
                interior = self._capturing.interior(call, module, arguments, *tried)
                interior.adds_gradients = path in self._repeated
                interior.copies_gradients = layouts.differ
                known[self._signature] = interior
            except Exception as error:  # noqa: BLE001 - whatever it is, the frame runs as in eager
                logger.info(_NOT_PLANNED, path, error)
            finally:
                outside.restore()
        found = self.find(path, arguments)
        shape.found.pop(path, None)
        if found is not None:
            shape.found[path] = found[0]

    # --- gradients --------------------------------------------------------------------------------

    def note_output(self, path: str, output: Any) -> None:
        """Has the layouts of gradients noted where a call ran as in eager."""
        if not self._is_noting:
            return
        for place, each in enumerate(tensors_in(output)):
            if each.grad_fn is not None:
                each.register_hook(partial(self._note, path, place, layout_of(each)))

    def _note(self, path: str, place: int, own: tuple[int, ...], gradient: torch.Tensor) -> None:
        """One that no trial had ends the use of insides, which are then captured again."""
        if self._layouts[path].add(place, own, gradient):
            self._known.pop(path, None)
            for shape in self._shapes.values():
                shape.paths.discard(path)
                shape.found.pop(path, None)
