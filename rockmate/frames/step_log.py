"""What has happened to the frames of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rockmate.frames.needs import FrameKey


@dataclass(slots=True)
class Counts:
    """What happened to frames.

    Attributes:
        num_frames: calls that were frames.
        num_kept: how many of them ran without hooks, as decided ahead.
        num_planned: how many ran a schedule of their captured inside.
        num_dropped: how many of them were dropped.
        num_recomputed: how many times a forward ran again.
        recomputed_s: seconds of these runs.
    """

    num_frames: int = 0
    num_kept: int = 0
    num_planned: int = 0
    num_dropped: int = 0
    num_recomputed: int = 0
    recomputed_s: float = 0.0


@dataclass(slots=True)
class StepLog:
    """Of the frames of one step.

    Attributes:
        counts: of what happened to them.
        dropped: what they have dropped, in words.
        peak_bytes: the largest predicted sum of held and needed bytes.
        undropped: paths of those that could not be dropped, if the step is measured or undone.
        tried: the frames of a step that is undone, see `FrameTrials`; None in others.
    """

    counts: Counts = field(default_factory=Counts)
    dropped: dict[FrameKey, str] = field(default_factory=dict)
    peak_bytes: int = 0
    undropped: set[str] = field(default_factory=set)
    tried: list[Any] | None = None
