"""The ways to run a frame's inside that is captured: one schedule each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """What one schedule takes. Bytes are beside what was live before.

    Attributes:
        held_bytes: from its forward to its backward, without its outputs.
        forward_bytes: peak of its forward.
        backward_bytes: peak of its backward, with what it holds, without the gradients of outputs.
        seconds: that it takes beyond the fastest one.
    """

    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"all but {self.held_bytes:,} bytes, as planned"
