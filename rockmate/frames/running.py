"""What a frame tells of itself to those that count and decide."""

from __future__ import annotations

from typing import Protocol

from rockmate.frames.in_flight import Step
from rockmate.frames.needs import FrameKey
from rockmate.frames.schedule_cost import ScheduleCost


class Running(Protocol):
    """A frame, or one that is kept."""

    key: FrameKey
    order: int
    step: Step

    @property
    def num_bytes(self) -> int: ...  # noqa: D102
    @property
    def schedule(self) -> ScheduleCost | None: ...  # noqa: D102


class Frame(Running, Protocol):
    """What a frame tells of itself; see `rockmate.frames.frame.Frame`."""

    seconds: float
    is_planned: bool

    @property
    def can_be_dropped(self) -> bool: ...  # noqa: D102
    def drop(self) -> None: ...  # noqa: D102


class Kept(Running, Protocol):
    """A frame without hooks; see `rockmate.frames.kept.KeptFrame`."""

    def release(self) -> None: ...  # noqa: D102
