"""What a frame tells of itself to those that count and decide."""

from __future__ import annotations

from typing import Protocol

from rockmate.frames.menu import FrameProfile, Offer
from rockmate.frames.needs import FrameKey
from rockmate.frames.way import Way


class Running(Protocol):
    """A frame, or one that is kept."""

    key: FrameKey
    order: int

    @property
    def num_bytes(self) -> int: ...  # noqa: D102
    @property
    def extra_bytes(self) -> int: ...  # noqa: D102
    @property
    def way(self) -> Way | None: ...  # noqa: D102


class Frame(Running, Protocol):
    """What a frame tells of itself; see `rockmate.frames.frame.Frame`."""

    seconds: float
    offers: tuple[Offer, ...]
    planned: Offer | None
    taken: Offer | None

    @property
    def next_offer(self) -> Offer | None: ...  # noqa: D102
    def drop(self, offer: Offer) -> None: ...  # noqa: D102
    def drop_all(self) -> None: ...  # noqa: D102
    def everything(self) -> Offer: ...  # noqa: D102
    def profile(self) -> FrameProfile: ...  # noqa: D102
    def check_tape(self) -> None: ...  # noqa: D102


class Kept(Running, Protocol):
    """A frame without hooks; see `rockmate.frames.kept.KeptFrame`."""

    def let_go(self) -> None: ...  # noqa: D102
