"""How much a captured inside may hold, so that all that follows in the step fits beside it.

What it holds is not given up later. So each way is weighed against the least that the rest of the
step takes: what lies outside of frames, the frame that needs most, and what other captured insides
have to hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.frames.needs import FrameKey, Needs, StepNeeds
from rockmate.frames.way import Way


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
        """Most bytes of frames that give up nothing, whichever follow."""
        return self._available_bytes - int(self._needs.minimum_bytes * self._scale)

    def number_for(
        self, key: FrameKey, ways: Sequence[Way], wanted: int | None, kept_bytes: int
    ) -> int | None:
        """The number of the way in which a frame runs.

        Args:
            key: which frame.
            ways: of its inside, of rising seconds.
            wanted: what was decided ahead; None if nothing was.
            kept_bytes: that other frames hold and cannot give up.

        Returns:
            What is wanted, or the fastest that there is room for; None if there is none.
        """
        numbers = range(len(ways))
        first = [] if wanted is None or wanted not in numbers else [wanted]
        for number in (*first, *numbers):
            if kept_bytes + self._peak_bytes(key, ways[number]) <= self._available_bytes:
                return number
        return None

    def _peak_bytes(self, key: FrameKey, way: Way) -> float:
        """Of the rest of the step, if the frame runs in a way and what follows holds nothing."""
        after_bytes = self._needs.least_after.get(key, self._needs.minimum_bytes)
        return max(
            forward_bytes(self._needs.of(key), way, self._scale),
            backward_bytes(self._needs.of(key), way, self._scale),
            self._scale * after_bytes + way.held_bytes,
        )


def least_way(ways: Sequence[Way]) -> int:
    """The number of the way that holds the least."""
    return min(range(len(ways)), key=lambda number: ways[number].held_bytes)


def forward_bytes(needs: Needs, way: Way | None, scale: float) -> int:
    """Peak of a frame's forward, as in eager or in a way.

    Args:
        needs: of the frame, in the measured step.
        way: how it runs; None if it runs as in eager.
        scale: size of the step relative to the measured one.
    """
    if way is None:
        return int(scale * needs.forward_bytes)
    return int(scale * needs.before_forward_bytes) + way.forward_bytes


def backward_bytes(needs: Needs, way: Way | None, scale: float) -> int:
    """Peak of a frame's backward; arguments as for `forward_bytes`."""
    if way is None:
        return int(scale * needs.backward_bytes)
    return int(scale * needs.before_backward_bytes) + way.backward_bytes
