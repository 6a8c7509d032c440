"""What the schedules of a captured frame take, and where its gradients go."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GradientContext:
    """Where the gradients of a submodule's calls go, as far as their bytes depend on it.

    Attributes:
        copies_gradients: whether gradients of outputs do not lie in memory as the outputs do, and
            are copied.
        adds_gradients: whether a parameter may have another gradient in the same step, to which
            autograd adds that of a call.
    """

    copies_gradients: bool = False
    adds_gradients: bool = False


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """What one schedule of a captured frame takes. Bytes are beside what was live before.

    Attributes:
        held_bytes: from its forward to its backward, without its outputs.
        read_output_bytes: of outputs that its backward reads.
        forward_bytes: peak of its forward.
        backward_bytes: peak of its backward, with what it holds, without its outputs and their
            gradients.
        added_bytes: of the end of its backward, while autograd adds a gradient of a parameter to
            another.
        output_gradient_bytes: of gradients of its outputs.
        recompute_s: recompute time.
        seconds: time of forward and backward beyond that of eager.
    """

    held_bytes: int
    read_output_bytes: int
    forward_bytes: int
    backward_bytes: int
    added_bytes: int
    output_gradient_bytes: int
    recompute_s: float
    seconds: float

    def within(self, around: GradientContext) -> ScheduleCost:
        """What it takes where gradients go like this."""
        backward_bytes = self.backward_bytes
        if around.adds_gradients:
            backward_bytes = max(backward_bytes, self.added_bytes)
        if around.copies_gradients:
            backward_bytes += self.output_gradient_bytes
        return replace(self, backward_bytes=backward_bytes)

    def scaled(self, factor: float) -> ScheduleCost:
        """That of a step so many times as large."""
        if factor == 1:
            return self
        names = (
            "held_bytes", "read_output_bytes", "forward_bytes", "backward_bytes", "added_bytes",
            "output_gradient_bytes",
        )  # fmt: skip
        sizes = {name: math.ceil(factor * getattr(self, name)) for name in names}
        return replace(
            self, recompute_s=factor * self.recompute_s, seconds=factor * self.seconds, **sizes
        )
