"""Decides ahead what the frames of a known step drop: a knapsack with one limit for each frame.

In a step of frames 1 to n, each takes one of its options, or drops nothing. A frame that runs as in
eager drops all that it has saved; a captured one runs one of its schedules. What the first k of
them still hold, H(k), is in memory while frame k + 1 runs forward and backward, and until then. So

    H(k) <= budget - after(k),   H(k - 1) <= budget - max(forward(k), backward(k)),

with the needs of a step that holds nothing. The seconds of all choices are to be the least. A frame
that comes in a share of the steps only counts by this share, bytes and seconds: where a step has
more of them than on average, others are dropped when it comes to that. Held bytes are counted in
units of a `_NUM_LEVELS`th of the budget: rounded up for the decision, which therefore fits, and
down for a bound, below which no decision that fits can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rockmate.budget import size_text
from rockmate.frames.needs import FrameKey, Needs

_NUM_LEVELS = 4096


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a frame.

    Attributes:
        num_bytes: that this frees, of what the frame saves as in eager.
        seconds: recompute time.
        schedule: its number, where the inside is captured; None drops all that is saved.
        peak_bytes: of the frame's forward and backward, by such a schedule.
    """

    num_bytes: int
    seconds: float
    schedule: int | None = None
    peak_bytes: int = 0

    def __str__(self) -> str:
        if self.schedule is None:
            return f"all, {size_text(self.num_bytes)}"
        return f"{size_text(max(0, self.num_bytes))}, as planned"


@dataclass(frozen=True, slots=True)
class KnownFrame:
    """A frame of a step that is decided ahead.

    Attributes:
        key: which call.
        needs: in a step that holds nothing; `saved_bytes` is what it holds if it drops nothing.
        choices: its options.
        share: of the steps, in which it comes.
    """

    key: FrameKey
    needs: Needs
    choices: Sequence[Option]
    share: float = 1.0

    def peak_bytes(self, number: int) -> int:
        """Of its forward and backward with its choice of a number from 1, or nothing (0)."""
        choice = self.choices[number - 1] if number else None
        if choice is not None and choice.schedule is not None:
            return choice.peak_bytes
        return max(self.needs.forward_bytes, self.needs.backward_bytes)

    def held_bytes(self, number: int) -> float:
        """What it holds on average by its option of a number from 1; 0 drops nothing."""
        dropped = self.choices[number - 1].num_bytes if number else 0
        return self.share * max(0, self.needs.saved_bytes - dropped)

    def seconds(self, number: int) -> float:
        """That this takes on average."""
        return self.share * self.choices[number - 1].seconds if number else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The option of each frame of a step.

    Attributes:
        options: of the frames that drop something.
        kept: frames that drop nothing.
    """

    options: dict[FrameKey, Option] = field(default_factory=dict)
    kept: frozenset[FrameKey] = frozenset()

    def seconds_of(self, keys: Iterable[FrameKey]) -> float:
        """Recompute time of some frames."""
        return sum(self.options[key].seconds for key in keys if key in self.options)


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
    options = {
        frame.key: frame.choices[which - 1]
        for frame, which in zip(frames, chosen[1], strict=True)
        if which
    }
    kept = frozenset(frame.key for frame in frames) - options.keys()
    return Decision(options, kept)


def bound_s(frames: Sequence[KnownFrame], budget_bytes: int) -> float | None:
    """Seconds below which no choices within the budget make all again; None if nothing fits."""
    found = _solve(frames, budget_bytes, np.floor)
    return None if found is None else found[0]


def _solve(
    frames: Sequence[KnownFrame], budget_bytes: int, rounded: Callable[[float], float]
) -> tuple[float, list[int]] | None:
    """Seconds, and for each frame 0 or the number of its choice from 1."""
    if budget_bytes <= 0:
        return None
    unit = budget_bytes / _NUM_LEVELS
    best: NDArray[np.float64] = np.zeros(_NUM_LEVELS + 1)
    chosen: list[NDArray[np.int32]] = []
    for frame in frames:
        new = np.full(_NUM_LEVELS + 1, np.inf)
        which = np.zeros(_NUM_LEVELS + 1, np.int32)
        for number in range(len(frame.choices) + 1):
            shift = int(rounded(frame.held_bytes(number) / unit))
            if shift > _NUM_LEVELS:
                continue
            shifted = best[: _NUM_LEVELS + 1 - shift] + frame.seconds(number)
            before = budget_bytes - frame.peak_bytes(number)  # most that is held before
            shifted[max(0, int(before // unit) + 1) :] = np.inf
            is_better = shifted < new[shift:]
            new[shift:][is_better] = shifted[is_better]
            which[shift:][is_better] = number
        most = budget_bytes - frame.needs.after_bytes
        new[max(0, int(most // unit) + 1) :] = np.inf
        best = new
        chosen.append(which)
    level = int(np.argmin(best))
    if not np.isfinite(best[level]):
        return None
    return float(best[level]), _choices(frames, chosen, level, unit, rounded)


def _choices(
    frames: Sequence[KnownFrame],
    chosen: Sequence[NDArray[np.int32]],
    level: int,
    unit: float,
    rounded: Callable[[float], float],
) -> list[int]:
    numbers = []
    for frame, which in zip(reversed(frames), reversed(chosen), strict=True):
        number = int(which[level])
        numbers.append(number)
        level -= int(rounded(frame.held_bytes(number) / unit))
    return numbers[::-1]
