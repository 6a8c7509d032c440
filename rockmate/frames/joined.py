"""Frames of several methods of one model, whose calls before one backward are one step."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from rockmate.frames.in_flight import Step
from rockmate.frames.runner import FrameRunner
from rockmate.frames.step_size import StepSize
from rockmate.frames.trials import FrameTrials


class JoinedRunner(FrameRunner):
    """Runs a model whose first argument names the method.

    A loss may be made of the outputs of two methods. The call of the second one goes on with the
    step of the first: its frames are measured and decided on together with those.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments and errors are those of `FrameRunner`."""
        super().__init__(*args, **options)
        self._step: weakref.ref[Step] | None = None
        given = options.get("trial", "log"), self._model, self._memory
        new_trials = partial(FrameTrials, *given, is_joined=True)
        self._trials_of: defaultdict[str, FrameTrials] = defaultdict(new_trials)
        self._num_elements: dict[str, int] = {}  # of the inputs of a method, in measured steps

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The method's output; see `FrameRunner.run`."""
        step = self._step and self._step()
        if step is None or step.is_over:
            return super().run(args, kwargs)
        memory, method = self._memory, args[0]
        memory.in_flight.present = step
        memory.in_flight.run(step)
        run = partial(self._run_frames, args, kwargs)
        return self._trials_of[method].run((args, kwargs), run)

    def _run_frames(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        memory, method = self._memory, args[0]
        self._step = weakref.ref(memory.in_flight.present)
        number = StepSize.of((args, kwargs), 0, (), memory.agreement).num_elements
        if memory.measuring.is_on:
            self._num_elements[method] = number
        else:
            scale = number / self._num_elements.get(method, number)
            memory.room.scale = max(memory.room.scale, scale)
        return super()._run_frames(args, kwargs)


class MethodFrames:
    """The frames of one method."""

    def __init__(self, runner: JoinedRunner, method: str) -> None:
        """Takes the frames of all of them, and its name."""
        self._runner, self._method = runner, method

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The method's output; see `FrameRunner.run`."""
        return self._runner.run((self._method, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        """All else is that of the frames of all methods."""
        return getattr(self._runner, name)
