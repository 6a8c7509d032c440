"""A frame whose inside is captured: its call runs one schedule, as one autograd function."""

from __future__ import annotations

from rockmate.frames.kept import KeptFrame
from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey
from rockmate.frames.schedule_cost import ScheduleCost


class PlannedFrame(KeptFrame):
    """One call of a submodule, which holds what its schedule says until its backward has ended."""

    def __init__(self, key: FrameKey, order: int, schedule: ScheduleCost, memory: Memory) -> None:
        """Counts nothing yet."""
        super().__init__(key, order, schedule.held_bytes, memory)
        self.schedule = schedule
