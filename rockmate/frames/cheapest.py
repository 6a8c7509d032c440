"""Which frame is dropped next: the least seconds for each byte and the distance to its backward."""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.frames.menu import Offer
from rockmate.frames.running import Frame


def cheapest(
    frames: Sequence[Frame], position: int, *, planned: bool = False
) -> tuple[Frame, Offer] | None:
    """The frame to drop next, and what it gives up; None if there is none.

    Each drop asks, so that only frames are asked that can be it.

    Args:
        frames: that may be.
        position: of the step, by frames.
        planned: whether only what was decided ahead counts.
    """
    prices = [
        (_price(each, offer, position), each.order, each, offer)
        for each in frames
        if (offer := each.next_offer) is not None and (not planned or offer is each.planned)
    ]
    return min(prices)[2:] if prices else None


def _price(frame: Frame, offer: Offer, position: int) -> float:
    """Seconds for each byte, and for each frame that lies between now and its backward."""
    before = frame.taken
    seconds, num_bytes = offer.seconds, offer.num_bytes
    if before is not None:
        seconds, num_bytes = seconds - before.seconds, num_bytes - before.num_bytes
    return seconds / (max(1, num_bytes) * max(1, position - frame.order))
