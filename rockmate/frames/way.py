"""The ways to run a frame's inside that is captured: one schedule each."""

from __future__ import annotations

import math
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

    def scaled(self, factor: float) -> Way:
        """That of a step so many times as large."""
        if factor == 1:
            return self
        held, forward, backward, gradient = (
            math.ceil(factor * each)
            for each in (
                self.held_bytes, self.forward_bytes, self.backward_bytes,
                self.output_gradient_bytes,
            )
        )  # fmt: skip
        return Way(held, forward, backward, gradient, factor * self.again_s, factor * self.seconds)
