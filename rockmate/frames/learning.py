"""When insides of frames are captured, and for which calls.

A capture and its trial take memory beside a step. So the steps in which insides are captured hold
nothing. They follow each step that was measured, until each frame has come in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate.frames.call import Arguments, Call
from rockmate.frames.interior import Interior, Interiors
from rockmate.frames.needs import StepNeeds
from rockmate.frames.storages import tensors_in

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
        self._found: dict[str, Interior] = {}
        self._with_copies: set[str] = set()  # paths to which gradients came in other layouts

    def begin(self) -> None:
        """A step has been measured: those that follow are to capture."""
        self._num_left, self._paths = _MOST_STEPS, set()
        self._found.clear()

    def goes_on(self, needs: StepNeeds | None) -> bool:
        """Whether the step that begins is to capture. When none is any more, the needs take ways.

        Args:
            needs: of the measured step.
        """
        if not self._num_left or needs is None:
            return False
        is_whole = {key.path for key in needs.by_key} <= self._paths
        self._num_left = 0 if is_whole else self._num_left - 1
        if not self._num_left:
            for path, interior in self._found.items():
                if path in self._with_copies:
                    interior.expect_copies()
                needs.take_ways(path, interior.ways)
        return self._num_left > 0

    def note(self, path: str, arguments: Arguments) -> None:
        """A call has come that may come again."""
        self._interiors.note(path, arguments)

    def take(self, call: Call, module: nn.Module, arguments: Arguments, output: Any) -> None:
        """Captures the inside of a call.

        Args:
            call: which has run.
            module: the submodule.
            arguments: of the call.
            output: of it.
        """
        path = call.key.path
        self._paths.add(path)
        self._interiors.learn(call, module, arguments)
        found = self._interiors.find(path, arguments)
        if found is None:
            return
        self._found[path] = found[0]
        for each in tensors_in(output):
            if each.grad_fn is not None:
                each.register_hook(partial(self._note_gradient, path, _layout_of(each)))

    def _note_gradient(self, path: str, layout: Sequence[int], gradient: torch.Tensor) -> None:
        if _layout_of(gradient) != layout:
            self._with_copies.add(path)

    def find(
        self, path: str, arguments: Arguments
    ) -> tuple[Interior, Sequence[torch.Tensor]] | None:
        """See `Interiors.find`."""
        return self._interiors.find(path, arguments)


def _layout_of(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions with more than one element."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size > 1]
