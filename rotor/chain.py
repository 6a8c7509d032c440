"""A chain of stages, which is the input of the solver, and the steps that run it, its output.

Stage ``s`` reads the boundary ``x_s`` and makes the boundary ``x_{s+1}``; the last stage makes the
chain's output. ``x_0``, the chain's input, is static: it is always live and never counted. The
backward pass visits the stages from last to first. At stage ``s`` it reads ``d_s``, the gradient of
the stage's output. All sizes are whole bytes and all times are milliseconds; this package does not
ask where they come from. A chain is checked when it is made, and never changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real

MAX_BYTES = 1 << 62
"""The largest size, budget and sum over a chain: the solver adds them up as 64-bit integers."""


def check_size(name: str, num_bytes: int) -> None:
    """Raise ``ValueError`` if a number of bytes is above ``MAX_BYTES``."""
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"{name} is {num_bytes}; it must be at most 2**62, {MAX_BYTES}: give a larger unit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. Peaks are beside its input.

    Attributes:
        input_bytes: The boundary ``x_s`` that enters the stage.
        output_gradient_bytes: ``d_s``, the gradient of the boundary that leaves the stage. For the
            last stage, the gradient of the chain's output, which counts from the start.
        forward_ms: Time of a forward.
        forward_peak_bytes: Peak of a forward that saves nothing, its output included.
        saved_bytes: Saved by a forward that keeps all that the backward reads, its output included.
        keep_peak_bytes: Peak of that forward; at least ``saved_bytes``.
        backward_ms: Time of the backward.
        backward_peak_bytes: Peak of the backward: the saved bytes and both gradients included.
    """

    input_bytes: int
    output_gradient_bytes: int
    forward_ms: float
    forward_peak_bytes: int
    saved_bytes: int
    keep_peak_bytes: int
    backward_ms: float
    backward_peak_bytes: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_bytes"):
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise ValueError(
                        f"{field.name} is {value!r}; it must be a whole number of bytes, at least 0"
                    )
                check_size(field.name, value)
            elif not (isinstance(value, Real) and math.isfinite(value) and float(value) >= 0):
                raise ValueError(
                    f"{field.name} is {value!r}; "
                    "it must be a finite number of milliseconds, at least 0"
                )
        if self.saved_bytes > self.keep_peak_bytes:
            raise ValueError(
                f"saved_bytes is {self.saved_bytes}; "
                f"it must be at most keep_peak_bytes, {self.keep_peak_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages in forward order. All sizes together are at most ``MAX_BYTES``.

    Attributes:
        stages: At least one stage.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        """Check that sizes contain their boundaries."""
        if not self.stages:
            raise ValueError("the chain has 0 stages; it must have at least 1")
        for s, stage in enumerate(self.stages):
            output_bytes = self.stages[s + 1].input_bytes if s + 1 < len(self.stages) else 0
            for name in ("forward_peak_bytes", "saved_bytes"):
                if getattr(stage, name) < output_bytes:
                    raise ValueError(
                        f"{name} of stage {s} is {getattr(stage, name)}; "
                        f"it must be at least the stage's output, {output_bytes}"
                    )
        check_size("the sum of the chain's sizes", self.peak_bound_bytes())

    def peak_bound_bytes(self) -> int:
        """Return an upper bound on the peak of every sequence of any part of the chain.

        It adds up every boundary, all that the stages save, the largest gradient in hand and the
        largest peak of a step.
        """
        return (
            sum(stage.input_bytes + stage.saved_bytes for stage in self.stages)
            + max(stage.output_gradient_bytes for stage in self.stages)
            + max(
                max(stage.forward_peak_bytes, stage.keep_peak_bytes, stage.backward_peak_bytes)
                for stage in self.stages
            )
        )


@dataclass(frozen=True, slots=True)
class ForwardOnly:
    """Run one stage forward and save nothing of it but its output."""

    stage: int

    def __str__(self) -> str:
        """Return for example ``F3``."""
        return f"F{self.stage}"


@dataclass(frozen=True, slots=True)
class ForwardKeep:
    """Run one stage forward and keep all that its backward reads, its output included."""

    stage: int

    def __str__(self) -> str:
        """Return for example ``K3``."""
        return f"K{self.stage}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run one stage backward from the values that were kept. It reads the stage's input once more.

    What was kept is live until then.
    """

    stage: int

    def __str__(self) -> str:
        """Return for example ``B3``."""
        return f"B{self.stage}"


Step = ForwardOnly | ForwardKeep | Backward


@dataclass(frozen=True, slots=True)
class Sequence:
    """The steps of one training pass; ``str`` gives for example ``F0 K1 B1 K0 B0``.

    A boundary is live from the step that makes it to the last step that reads it before it is
    recomputed. No step releases it by name.
    """

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """Return the steps in one line."""
        return " ".join(map(str, self.steps))
