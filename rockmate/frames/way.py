"""The ways to run a frame's inside that is captured: one schedule each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What lies around the calls of a submodule, as far as their bytes depend on it.

    Attributes:
        copies_gradients: whether gradients of outputs do not lie in memory as the outputs do, and
            are copied.
        adds_gradients: whether a parameter may have another gradient in the same step, to which
            autograd adds that of a call.
    """

    copies_gradients: bool = False
    adds_gradients: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """What one schedule takes. Bytes are beside what was live before.

    Attributes:
        held_bytes: from its forward to its backward, without its outputs.
        read_output_bytes: of outputs that its backward reads.
        forward_bytes: peak of its forward.
        backward_bytes: peak of its backward, with what it holds, without its outputs and their
            gradients.
        added_bytes: of the end of its backward, while autograd adds a gradient of a parameter to
            another.
        output_gradient_bytes: of gradients of its outputs.
        again_s: seconds that it makes things again.
        seconds: that forward and backward take beyond those of eager.
    """

    held_bytes: int
    read_output_bytes: int
    forward_bytes: int
    backward_bytes: int
    added_bytes: int
    output_gradient_bytes: int
    again_s: float
    seconds: float

    def within(self, around: Surroundings) -> Way:
        """What it takes within some surroundings."""
        backward_bytes = self.backward_bytes
        if around.adds_gradients:
            backward_bytes = max(backward_bytes, self.added_bytes)
        if around.copies_gradients:
            backward_bytes += self.output_gradient_bytes
        return replace(self, backward_bytes=backward_bytes)

    def scaled(self, factor: float) -> Way:
        """That of a step so many times as large."""
        if factor == 1:
            return self
        names = (
            "held_bytes", "read_output_bytes", "forward_bytes", "backward_bytes", "added_bytes",
            "output_gradient_bytes",
        )  # fmt: skip
        sizes = {name: math.ceil(factor * getattr(self, name)) for name in names}
        return replace(self, again_s=factor * self.again_s, seconds=factor * self.seconds, **sizes)
