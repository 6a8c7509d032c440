"""The ways to run a frame's inside that is captured: one schedule each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """What one schedule takes. Bytes are beside what was live before.

    Attributes:
        held_bytes: from its forward to its backward, without its outputs.
        forward_bytes: peak of its forward.
        backward_bytes: peak of its backward, with what it holds, without gradients of its outputs.
        output_gradient_bytes: of these. They are copied where they do not lie in memory as the
            outputs do.
        again_s: seconds that it makes things again.
        seconds: that forward and backward take beyond those of eager.
    """

    held_bytes: int
    forward_bytes: int
    backward_bytes: int
    output_gradient_bytes: int
    again_s: float
    seconds: float
