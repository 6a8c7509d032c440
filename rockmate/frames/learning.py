"""When insides of frames are captured, and for which calls.

A capture and its trial take memory beside a step. So the steps in which insides are captured hold
nothing. They follow each step that was measured, until each frame has come in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rockmate.frames.call import Arguments, Call
from rockmate.frames.interior import Interior, Interiors
from rockmate.frames.needs import StepNeeds

_MOST_STEPS = 4
"""A frame may come never again, or seldom: one is left out of many steps by LayerDrop."""


class Learning:
    """What is known of insides, and what is still to be captured."""

    def __init__(self, interiors: Interiors) -> None:
        """Nothing yet.

        Args:
            interiors: captures.
        """
        self._interiors = interiors
        self._num_left = 0
        self._paths: set[str] = set()

    def begin(self) -> None:
        """A step has been measured: those that follow are to capture."""
        self._num_left, self._paths = _MOST_STEPS, set()

    def goes_on(self, needs: StepNeeds | None) -> bool:
        """Whether the step that begins is to capture.

        Args:
            needs: of the measured step.
        """
        if not self._num_left or needs is None:
            return False
        is_whole = {key.path for key in needs.by_key} <= self._paths
        self._num_left = 0 if is_whole else self._num_left - 1
        return not is_whole

    def note(self, path: str, arguments: Arguments) -> None:
        """A call has come that may come again."""
        self._interiors.note(path, arguments)

    def take(
        self, call: Call, module: nn.Module, arguments: Arguments, needs: StepNeeds | None
    ) -> None:
        """Captures the inside of a call, and takes its ways for all calls of the path.

        Args:
            call: which has run.
            module: the submodule.
            arguments: of the call.
            needs: take the ways.
        """
        path = call.key.path
        self._paths.add(path)
        self._interiors.learn(call, module, arguments)
        found = self._interiors.find(path, arguments)
        if found is not None and needs is not None:
            needs.take_ways(path, found[0].ways)

    def find(
        self, path: str, arguments: Arguments
    ) -> tuple[Interior, Sequence[torch.Tensor]] | None:
        """See `Interiors.find`."""
        return self._interiors.find(path, arguments)
