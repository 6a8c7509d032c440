"""Steps of frames that are held against eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rockmate.frames.memory import Memory
from rockmate.trial.conditions import Conditions
from rockmate.trial.run import run_beside_eager
from rockmate.trial.steps import TrialOption, TrialSteps


class FrameTrials:
    """Which steps of frames are trials, and what each keeps.

    A step that is measured is none, as its budget is not known yet, nor one that begins before the
    backward of another. The next one is in its place.

    The plain forward, which saves nothing, holds less than the smallest peak of frames: that is
    outside of frames all that is saved, and of one frame forward and backward.
    """

    def __init__(self, option: TrialOption, *, is_joined: bool = False) -> None:
        """None has been made yet; `is_joined` ones are beside frames of the same step."""
        self._steps, self._is_joined = TrialSteps(option), is_joined

    def run(
        self,
        model: nn.Module,
        call: tuple[tuple[Any, ...], Mapping[str, Any]],
        ours: Callable[[], Any],
        memory: Memory,
    ) -> Any:
        """The output of a step of frames, held against eager if the step is a trial.

        Args:
            model: the model.
            call: positional and keyword arguments.
            ours: runs the step's forward.
            memory: of the frames.

        Raises:
            TrialError: the step differs from eager.
        """
        budget_bytes, needs = memory.budget_bytes, memory.needs
        is_measured = memory.recorder is not None or needs is None or budget_bytes is None
        held_bytes = memory.held_bytes
        can_run = not is_measured and memory.agreement is None
        can_run &= self._is_joined or not held_bytes
        if not self._steps.is_next(can_run=can_run) or budget_bytes is None or needs is None:
            return ours()
        is_on_cpu = memory.device.type == "cpu"
        room_bytes = max(0, budget_bytes - needs.outside_bytes - held_bytes)
        own_bytes = [each.forward_bytes - each.before_forward_bytes for each in needs.by_key.values()]
        conditions = Conditions(
            most_bytes=room_bytes if self._is_joined else budget_bytes,
            largest_bytes=max(own_bytes) if self._is_joined else 0,
            most_copied_bytes=room_bytes,
            is_exact=is_on_cpu or torch.are_deterministic_algorithms_enabled(),
            what="the step in frames",
        )
        return run_beside_eager(model, *call, ours, conditions)
