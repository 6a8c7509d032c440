"""How much a captured inside may hold, so that all that follows in the step fits beside it.

What it holds is not dropped later. So each schedule is weighed against the least that the rest of
the step takes: what lies outside of frames, the frame that needs most, and what other captured
insides have to hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.frames.needs import FrameKey, Needs, StepNeeds
from rockmate.frames.schedule_cost import ScheduleCost


class Room:
    """Of one step."""

    def __init__(self, needs: StepNeeds, available_bytes: int, scale: float) -> None:
        """Knows what follows each frame.

        Args:
            needs: of a measured step.
            available_bytes: of the budget, less what cannot be allocated.
            scale: size of the step relative to the measured one.
        """
        self._needs, self._available_bytes, self._scale = needs, available_bytes, scale

    @property
    def kept_bytes(self) -> int:
        """Most bytes of frames that drop nothing, whichever follow."""
        return self._available_bytes - int(self._needs.minimum_bytes * self._scale)

    def number_for(
        self, key: FrameKey, schedules: Sequence[ScheduleCost], wanted: int | None, kept_bytes: int
    ) -> int | None:
        """The number of the schedule that a frame runs.

        Args:
            key: which frame.
            schedules: of its inside, of rising seconds.
            wanted: what was decided ahead; None if nothing was.
            kept_bytes: that other frames hold and cannot drop.

        Returns:
            What is wanted, or the fastest that there is room for; None if there is none.
        """
        numbers = range(len(schedules))
        first = [] if wanted is None or wanted not in numbers else [wanted]
        for number in (*first, *numbers):
            if kept_bytes + self._peak_bytes(key, schedules[number]) <= self._available_bytes:
                return number
        return None

    def _peak_bytes(self, key: FrameKey, schedule: ScheduleCost) -> float:
        """Peak of the rest of the step by a schedule, if what follows holds nothing."""
        after_bytes = self._needs.least_after.get(key, self._needs.minimum_bytes)
        return max(
            forward_bytes(self._needs.of(key), schedule, self._scale),
            backward_bytes(self._needs.of(key), schedule, self._scale),
            self._scale * after_bytes + schedule.held_bytes,
        )


def smallest_schedule(schedules: Sequence[ScheduleCost]) -> int:
    """The number of the schedule that holds the least."""
    return min(range(len(schedules)), key=lambda number: schedules[number].held_bytes)


def forward_bytes(needs: Needs, schedule: ScheduleCost | None, scale: float) -> int:
    """Peak of a frame's forward, as in eager or by a schedule.

    Args:
        needs: of the frame, in the measured step.
        schedule: which; None if it runs as in eager.
        scale: size of the step relative to the measured one.
    """
    if schedule is None:
        return int(scale * needs.forward_bytes)
    return int(scale * needs.before_forward_bytes) + schedule.forward_bytes


def backward_bytes(needs: Needs, schedule: ScheduleCost | None, scale: float) -> int:
    """Peak of a frame's backward; arguments as for `forward_bytes`."""
    if schedule is None:
        return int(scale * needs.backward_bytes)
    return int(scale * needs.before_backward_bytes) + schedule.backward_bytes
