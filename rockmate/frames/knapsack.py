"""Decides ahead what the frames of a known step drop: a knapsack with one limit for each frame.

In a step of frames 1 to n, each runs by one of its options: it drops nothing, or all that it has
saved, or a captured one runs one of its schedules. What the first k of them still hold, H(k), is in
memory while frame k + 1 runs forward and backward, and until then. So

    H(k) <= budget - after(k),   H(k - 1) <= budget - peak(k),

with the needs of a step that holds nothing. The seconds of all choices are to be the least. A frame
that comes in a share of the steps only counts by this share, bytes and seconds: where a step has
more of them than on average, others are dropped when it comes to that. Held bytes are counted in
units of a `_NUM_LEVELS`th of the budget: rounded up for the decision, which therefore fits, and
down for a bound, below which no decision that fits can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rockmate.frames.needs import FrameKey, Option

_NUM_LEVELS = 4096


class KnownFrame(NamedTuple):
    """A frame of a step that is decided ahead.

    Attributes:
        key: which call.
        after_bytes: live behind it, in a step that holds nothing.
        options: how it may run.
        share: of the steps, in which it comes.
    """

    key: FrameKey
    after_bytes: int
    options: Sequence[Option]
    share: float = 1.0


Decision = Mapping[FrameKey, Option]
"""The option of each frame of a step; empty where nothing was decided."""


def decidable_bytes(least_bytes: int, num_frames: int) -> int:
    """A budget for which there is a decision if what frames hold at least fits into some bytes.

    Args:
        least_bytes: the smallest peak.
        num_frames: each may hold a little, which is rounded up.
    """
    return least_bytes + least_bytes * (num_frames + 1) // _NUM_LEVELS


def decide(frames: Sequence[KnownFrame], budget_bytes: int) -> Decision | None:
    """The choices of the least seconds within the budget; None if nothing fits.

    Args:
        frames: in the order of their forwards.
        budget_bytes: for what frames hold and what they need beside it.
    """
    chosen = _solve(frames, budget_bytes, np.ceil)
    if chosen is None:
        return None
    pairs = zip(frames, chosen[1], strict=True)
    return {frame.key: frame.options[number] for frame, number in pairs}


def bound_s(frames: Sequence[KnownFrame], budget_bytes: int) -> float | None:
    """Seconds that any decision within the budget takes at least; None if nothing fits."""
    found = _solve(frames, budget_bytes, np.floor)
    return None if found is None else found[0]


def _solve(
    frames: Sequence[KnownFrame], budget_bytes: int, rounded: Callable[[float], float]
) -> tuple[float, list[int]] | None:
    """Seconds, and for each frame the number of its option."""
    if budget_bytes <= 0:
        return None
    unit = budget_bytes / _NUM_LEVELS
    best: NDArray[np.float64] = np.zeros(_NUM_LEVELS + 1)
    chosen: list[NDArray[np.int32]] = []
    units = [
        [int(rounded(frame.share * each.held_bytes / unit)) for each in frame.options]
        for frame in frames
    ]
    for frame, shifts in zip(frames, units, strict=True):
        new = np.full(_NUM_LEVELS + 1, np.inf)
        which = np.zeros(_NUM_LEVELS + 1, np.int32)
        for number, (option, shift) in enumerate(zip(frame.options, shifts, strict=True)):
            if shift > _NUM_LEVELS:
                continue
            shifted = best[: _NUM_LEVELS + 1 - shift] + frame.share * option.seconds
            before = budget_bytes - option.peak_bytes  # most that is held before
            shifted[max(0, int(before // unit) + 1) :] = np.inf
            is_better = shifted < new[shift:]
            new[shift:][is_better] = shifted[is_better]
            which[shift:][is_better] = number
        most = budget_bytes - frame.after_bytes
        new[max(0, int(most // unit) + 1) :] = np.inf
        best = new
        chosen.append(which)
    level = int(np.argmin(best))
    seconds, numbers = float(best[level]), list[int]()
    if not np.isfinite(seconds):
        return None
    for shifts, which in zip(reversed(units), reversed(chosen), strict=True):
        numbers.append(int(which[level]))
        level -= shifts[numbers[-1]]
    return seconds, numbers[::-1]
