"""Whether frames keep the budget: the real peak of steps, errors, and lines of the log.

What a step takes beside its frames is known from a measured one. Another step may run other ops, or
its script may hold more. So peaks are looked at where that is free: on CUDA in each step, by the
allocator's counters, and on a CPU, where a profiler has to be on, in steps 2, 4, 8, 16, ... and in
the one after a step that has passed the budget, or has by the account of frames. After a real peak
above it all frames count as taking so much more, and a line says so. If the next one that is looked
at passes it again, the budget cannot be kept.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import nn

from rockmate._torch.storage import bytes_of
from rockmate.budget import Budget, parse_budget, size_text
from rockmate.errors import InfeasibleBudgetError
from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey
from rockmate.frames.step_log import StepLog

logger = logging.getLogger(__name__)

_TOLERANCE = 1.01
"""A peak within so much of the budget is no fault."""
_LOWERED = 0.9
"""Of the live bytes at which memory has run out: the budget of what follows."""


class PeakCheck:
    """Of the steps of one model.

    On CUDA the allocator knows the largest peak of all time. A step that reaches a larger one than
    all before has its own; of others it is known that theirs is no larger.
    """

    def __init__(self, model: nn.Module, memory: Memory, *, may_refuse: bool) -> None:
        """No step has run. A budget that is passed twice ends in an error if that may be."""
        self._model, self._memory, self._may_refuse = model, memory, may_refuse
        self._num_steps = self._num_passed = self._real_bytes = self._told_bytes = 0
        self._was_looked_at, self._num_asked_for = False, 0
        self._cleared_bytes = 0  # an account of so much was of a step within the budget
        self._was_unmeasured = False
        self._captured: StepLog | None = None  # of a step of which a line tells that it captures

    def note_profiler(self, budget: Budget, *, is_unmeasured: bool) -> None:
        """Says so at the first of some steps that cannot be measured, since a profiler is on."""
        if is_unmeasured and not self._was_unmeasured:
            logger.warning(
                "a profiler is running, so this step cannot be measured, and nothing keeps the "
                "budget of %s until one as large has run without it. Start it after the first "
                "steps, or leave it out.", size_text(budget) if isinstance(budget, int) else budget,
            )  # fmt: skip
        self._was_unmeasured = is_unmeasured

    def is_due(self, *, is_profiled: bool) -> bool:
        """Whether the step that begins is to be recorded, which none with a profiler can be."""
        memory = self._memory
        if memory.room.is_capturing or memory.agreement is not None:
            return False
        if memory.budget_bytes is None and memory.log.counts.num_frames:  # no backward came yet
            return False
        self._num_steps += 1
        if memory.device.type == "cuda" and memory.budget_bytes is not None:
            begin_bytes = torch.cuda.memory_allocated(memory.device)
            known_bytes = torch.cuda.max_memory_allocated(memory.device)
            gradient_bytes = self._gradient_bytes()
            memory.backward.at_end = partial(self._end, begin_bytes, known_bytes, gradient_bytes)
            return False
        is_power_of_two = self._num_steps & (self._num_steps - 1) == 0
        is_asked_for = self._num_asked_for or self._num_passed == 1 or is_power_of_two
        return bool(not is_profiled and self._num_steps > 1 and is_asked_for)

    def _end(self, begin_bytes: int, known_bytes: int, gradient_bytes: int) -> None:
        """A backward on CUDA has ended: the peak of the step, without its new gradients."""
        peak_bytes = torch.cuda.max_memory_allocated(self._memory.device)
        new_bytes = 0 if gradient_bytes else self._gradient_bytes()
        is_known = peak_bytes == known_bytes
        self._real_bytes = 0 if is_known else peak_bytes - begin_bytes - new_bytes
        self._was_looked_at = True

    def _gradient_bytes(self) -> int:
        found = (each.grad for each in self._model.parameters())
        return sum(bytes_of(each) for each in found if each is not None)

    def note(self, peak_bytes: int) -> None:
        """Takes what a recorded step had live around its frames, or without any; 0 if unknown."""
        if peak_bytes:
            self._real_bytes, self._was_looked_at = peak_bytes, True

    def note_minimum(self, peak_bytes: int, budget_bytes: int) -> None:
        """Says so where frames as they are cannot keep the budget in a step; later ones may."""
        if peak_bytes > _TOLERANCE * budget_bytes:
            logger.warning(
                "a step takes %s, more than the budget of %s. Next its frames are split, or their "
                "insides captured, which may take less.",
                size_text(peak_bytes), size_text(budget_bytes),
            )  # fmt: skip

    def note_capture(self, key: FrameKey, tensors: list[torch.Tensor]) -> None:
        """Says so, once in a step, where the capture of a frame's inside may pass the budget.

        It runs the frame forward and backward beside the step, with gradients of its own.

        Args:
            key: the frame.
            tensors: that come on top: parameters for their gradients; inputs; outputs twice, as
                they are saved while their gradients are there.
        """
        memory = self._memory
        if memory.needs is None or memory.budget_bytes is None or self._captured is memory.log:
            return
        needs = memory.needs.of(key)
        forward_bytes = needs.forward_bytes - needs.before_forward_bytes
        own_bytes = max(forward_bytes, needs.backward_bytes - needs.before_backward_bytes)
        beside_bytes = memory.held_bytes + sum(map(bytes_of, tensors))
        peak_bytes = beside_bytes + int(memory.room.scale * (needs.after_bytes + own_bytes))
        if peak_bytes > memory.budget_bytes:
            self._captured = memory.log
            logger.warning(
                "this step captures the insides of frames, which may take it to %s or more, above "
                "the budget of %s: plan_frames=False captures none.",
                size_text(peak_bytes), size_text(memory.budget_bytes),
            )  # fmt: skip

    def refusal_of_last_step(self) -> InfeasibleBudgetError | None:
        """Takes what the last step has shown; an error if the budget cannot be kept."""
        memory, real_bytes = self._memory, self._real_bytes
        was_looked_at, self._was_looked_at, self._real_bytes = self._was_looked_at, False, 0
        budget_bytes = memory.budget_bytes
        if budget_bytes is None or memory.needs is None or memory.room.is_capturing:
            return None
        allowed_bytes = _TOLERANCE * budget_bytes
        if not was_looked_at:  # the account may be of too much, as a look at such a step shows
            if memory.log.peak_bytes > max(allowed_bytes, self._cleared_bytes):
                if not self._num_asked_for:
                    self._tell("may have", memory.log.peak_bytes, "The next ones are looked at.")
                self._num_asked_for = 2  # steps of two kinds may take turns
            return None
        self._num_asked_for = max(0, self._num_asked_for - 1)
        excess_bytes = max(0, int((real_bytes - memory.log.peak_bytes) / memory.room.scale))
        if real_bytes <= allowed_bytes:  # steps as large leave room for it, where there is some
            self._num_passed = 0
            self._cleared_bytes = max(self._cleared_bytes, memory.log.peak_bytes)
            room_bytes = budget_bytes - memory.minimum_bytes(memory.needs)
            added_bytes = min(excess_bytes, room_bytes)
            if added_bytes > 0 and memory.room.scale >= 1:  # what is known of needs is derived anew
                memory.needs.add(added_bytes)
            return None
        self._num_passed += 1
        memory.needs.add(excess_bytes)
        if self._num_passed > 1 and self._may_refuse:
            where = "a step that runs other ops than the one that was measured"
            return InfeasibleBudgetError(budget_bytes, real_bytes, where=where)
        if real_bytes > _TOLERANCE * self._told_bytes:
            self._told_bytes = real_bytes
            self._tell("has", real_bytes, "The following steps hold less.")
        return None

    def _tell(self, verb: str, peak_bytes: int, next_step: str) -> None:
        logger.warning(
            "a step %s taken %s, more than the budget of %s: it ran other ops than the one that "
            "was measured, or the script held more. %s",
            verb, size_text(peak_bytes), size_text(self._memory.budget_bytes or 0), next_step,
        )  # fmt: skip

    def refusal_without_frames(
        self, budget: Budget, peak_bytes: int
    ) -> InfeasibleBudgetError | None:
        """Takes a recorded step without frames; says so if it passes the budget.

        Args:
            budget: bytes, a size, or a fraction of the step's peak.
            peak_bytes: of the step.
        """
        budget_bytes = parse_budget(budget, peak_bytes)
        if peak_bytes <= max(budget_bytes, self._told_bytes):
            return None
        self._told_bytes = peak_bytes
        logger.warning(
            "no call of a submodule could be a frame, so nothing keeps the budget of %s: the step "
            "takes %s. Frames are calls of submodules that have submodules, outside of checkpoints "
            "and of keep.",
            size_text(budget_bytes), size_text(peak_bytes),
        )  # fmt: skip
        if not self._may_refuse:
            return None
        where = "a step of which no call can be a frame"
        return InfeasibleBudgetError(budget_bytes, peak_bytes, where=where)


# --- errors and lines of the log ------------------------------------------------------------------


def lowered(memory: Memory, key: FrameKey) -> int | None:
    """After memory ran out in a frame: the budget from now on, if it is lower, and a line."""
    needs, before_bytes = memory.needs, memory.budget_bytes
    if needs is None or before_bytes is None:
        return None
    live_bytes = memory.held_bytes + int(needs.of(key).forward_bytes * memory.room.scale)
    lowered_bytes = max(int(_LOWERED * live_bytes), needs.minimum_bytes)
    if lowered_bytes >= before_bytes:
        return None
    memory.budget_bytes = lowered_bytes
    logger.warning(
        "out of memory in %s, within the budget of %s, which is %s from now on",
        key, size_text(before_bytes), size_text(lowered_bytes),
    )  # fmt: skip
    return lowered_bytes
