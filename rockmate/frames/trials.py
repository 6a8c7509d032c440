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
    backward of another. The next one is in its place. The first step in which captured insides run
    is one, too.

    The plain forward, which saves nothing, holds less than the smallest peak of frames: that is
    outside of frames all that is saved, and of one frame forward and backward.
    """

    def __init__(self, option: TrialOption) -> None:
        """None has been made yet."""
        self._steps = TrialSteps(option)
        self._tried = {0}  # ways of steps

    def repeat(self) -> None:
        """Has the next ways be tried, those of no inside, too."""
        self._tried.clear()

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
        can_run = not is_measured and memory.agreement is None and not memory.held_bytes
        is_due = needs is not None and needs.ways_number not in self._tried
        is_next = self._steps.is_next(can_run=can_run, is_due=is_due)
        if not is_next or budget_bytes is None or needs is None:
            return ours()
        self._tried.add(needs.ways_number)
        is_on_cpu = memory.device.type == "cpu"
        room_bytes = max(0, budget_bytes - needs.outside_bytes)
        conditions = Conditions(
            most_bytes=budget_bytes,
            most_copied_bytes=room_bytes,
            is_exact=is_on_cpu or torch.are_deterministic_algorithms_enabled(),
            what="the step in frames",
        )
        return run_beside_eager(model, *call, ours, conditions)
