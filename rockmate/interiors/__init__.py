"""Insides of frames that can be captured: each of their calls runs one of several schedules."""

from __future__ import annotations

from collections.abc import Callable

from rockmate.frames.interior import Interiors


def captured_interiors(clock: Callable[[], float]) -> Interiors:
    """What captures the insides of one model's frames.

    Args:
        clock: seconds.
    """
    from rockmate.interiors.captured import CapturedInteriors  # loads solvers

    return CapturedInteriors(clock)
