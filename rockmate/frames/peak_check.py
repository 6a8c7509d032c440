"""Holds the real peak of steps against the budget.

What a step takes beside its frames is known from a measured one. Another step may run other ops, or
its script may hold more. So peaks are looked at where that is free: on CUDA in each step, by the
allocator's counters, and on a CPU, where a profiler has to be on, in steps 2, 4, 8, 16, ... and in
the one after a step that has passed the budget. After such a step all frames count as taking so
much more, and a line says so. If the next one that is looked at passes it again, the budget cannot
be kept.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from rockmate._torch.storage import bytes_of
from rockmate.budget import size_text
from rockmate.errors import InfeasibleBudgetError
from rockmate.frames.memory import Memory
from rockmate.frames.needs import StepNeeds

logger = logging.getLogger(__name__)

_TOLERANCE = 1.01
"""A peak within so much of the budget is no fault."""


class PeakCounter:
    """The peak of a step by the counters of CUDA's allocator, which it leaves as they are.

    The allocator knows the largest peak of all time. A step that reaches a larger one than all
    before has its own; of others it is known that theirs is no larger.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """No step has begun."""
        self._model, self._device = model, device
        self._begin_bytes = self._peak_bytes = 0
        self._has_gradients = False

    def begin(self) -> None:
        """A step begins."""
        self._begin_bytes = torch.cuda.memory_allocated(self._device)
        self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self._has_gradients = self._gradient_bytes() > 0

    def peak_bytes(self) -> int:
        """Of the step that ends, without its new gradients; 0 if it was no larger than others."""
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if peak_bytes == self._peak_bytes:
            return 0
        new_bytes = 0 if self._has_gradients else self._gradient_bytes()
        return peak_bytes - self._begin_bytes - new_bytes

    def _gradient_bytes(self) -> int:
        found = (each.grad for each in self._model.parameters())
        return sum(bytes_of(each) for each in found if each is not None)


class PeakCheck:
    """Of the steps of one model."""

    def __init__(self, model: nn.Module, memory: Memory, *, may_refuse: bool) -> None:
        """No step has run.

        Args:
            model: whose steps they are.
            memory: of the model.
            may_refuse: whether a budget that is passed twice ends in an error.
        """
        self._memory, self._may_refuse = memory, may_refuse
        self._counter = PeakCounter(model, memory.device) if memory.device.type == "cuda" else None
        self._num_steps = self._num_passed = self._real_bytes = self._told_bytes = 0
        self._was_looked_at = False

    def is_due(self, *, is_profiled: bool) -> bool:
        """Whether the step that begins is to be recorded.

        Args:
            is_profiled: whether somebody's profiler is on, so that none can be.
        """
        memory = self._memory
        if memory.budget_bytes is None or memory.is_capturing or memory.agreement is not None:
            return False
        self._num_steps += 1
        if self._counter is not None:
            self._counter.begin()
            memory.at_end = self._end
            return False
        is_power_of_two = self._num_steps & (self._num_steps - 1) == 0
        return not is_profiled and self._num_steps > 1 and (self._num_passed > 0 or is_power_of_two)

    def _end(self) -> None:
        assert self._counter is not None
        self._real_bytes, self._was_looked_at = self._counter.peak_bytes(), True

    def note(self, needs: StepNeeds | None) -> None:
        """Takes what a recorded step had live around its frames; None if that is not known."""
        if needs is not None and needs.by_key:
            self._real_bytes = max(each.peak_bytes for each in needs.by_key.values())
            self._was_looked_at = True

    def refusal_of_last_step(self) -> InfeasibleBudgetError | None:
        """Takes what the last step has shown; an error if the budget cannot be kept."""
        memory, real_bytes = self._memory, self._real_bytes
        was_looked_at, self._was_looked_at, self._real_bytes = self._was_looked_at, False, 0
        budget_bytes = memory.budget_bytes
        if budget_bytes is None or memory.needs is None or memory.is_capturing:
            return None
        peak_bytes = max(memory.peak_bytes, real_bytes)
        if peak_bytes <= _TOLERANCE * budget_bytes:
            self._num_passed = 0 if was_looked_at else self._num_passed
            return None
        self._num_passed += 1
        if real_bytes > memory.peak_bytes:
            memory.needs.add(int((real_bytes - memory.peak_bytes) / memory.scale))
        if self._num_passed > 1 and self._may_refuse:
            where = "a step that runs other ops than the one that was measured"
            return InfeasibleBudgetError(budget_bytes, peak_bytes, where=where)
        if peak_bytes > self._told_bytes:
            self._told_bytes = peak_bytes
            logger.warning(
                "a step has taken %s, more than the budget of %s: it ran other ops than the one "
                "that was measured, or the script held more. The following steps hold less.",
                size_text(peak_bytes), size_text(budget_bytes),
            )  # fmt: skip
        return None
