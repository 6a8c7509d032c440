"""Whether a script differentiates gradients (create_graph=True), as a first step in frames shows.

A planned backward has no second derivative, and once it runs it is too late for frames. Scripts
that want one, for a penalty or for forces, have inputs that require gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rockmate.state.opened_object import tensors_within

logger = logging.getLogger(__name__)


class FirstBackward:
    """The first step whose inputs require gradients. Frames run it."""

    def __init__(self, make_frames: Callable[[], Any]) -> None:
        self._make_frames, self._frames, self._is_twice = make_frames, None, False

    def is_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call begins that step."""
        given = tensors_within((args, kwargs))
        return self._frames is None and any(each.requires_grad for each in given)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of that call."""
        self._frames = self._make_frames()
        output = self._frames.run(args, kwargs)
        for node in {each.grad_fn for each in tensors_within(output) if each.grad_fn is not None}:
            node.register_prehook(self._note)
        return output

    def _note(self, _: Any) -> None:
        self._is_twice |= torch.is_grad_enabled()

    def chosen_frames(self) -> Any:
        """The frames, if that step has had second derivatives; else None."""
        if self._frames is not None:
            self._frames.end_recording()
        if self._is_twice:
            logger.warning("the budget is kept by frames: a plan has no second derivative")
        return self._frames if self._is_twice else None
