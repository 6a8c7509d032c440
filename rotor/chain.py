"""The input of the solver: a chain of stages, and the options that run each span of them.

Stage ``s`` reads the boundary ``x_s`` and makes the boundary ``x_{s+1}``; the last stage makes the
chain's output. ``x_0``, the chain's input, is static: it is always live and never counted. The
backward pass visits the stages from last to first. At stage ``s`` it reads ``d_s``, the gradient of
the stage's output, and leaves ``g_s`` bytes of parameter gradients behind. All sizes are whole
bytes and all times are milliseconds; this package does not ask where they come from. A chain is
checked when it is made, and never changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real

MAX_BYTES = 1 << 62
"""The largest size, budget and sum over a chain: the solver adds them up as 64-bit integers."""


def _check_numbers(owner: Option | Stage) -> None:
    """Raise ``ValueError`` unless sizes are whole numbers >= 0 and times finite numbers >= 0."""
    for field in fields(owner):
        value = getattr(owner, field.name)
        if field.name.endswith("_bytes"):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(
                    f"{field.name} is {value!r}; it must be a whole number of bytes, at least 0"
                )
            check_size(field.name, value)
        elif not (isinstance(value, Real) and math.isfinite(value) and float(value) >= 0):
            raise ValueError(
                f"{field.name} is {value!r}; it must be a finite number of milliseconds, at least 0"
            )


def check_size(name: str, num_bytes: int) -> None:
    """Raise ``ValueError`` if a number of bytes is above ``MAX_BYTES``."""
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"{name} is {num_bytes}; it must be at most 2**62, {MAX_BYTES}: give a larger unit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a span of stages forward, and later backward.

    Attributes:
        saved_bytes: Saved from the span's forward to its backward, beside the span's input.
            Includes the boundary that the span makes.
        forward_peak_bytes: Peak of the forward beside the span's input; at least ``saved_bytes``.
        backward_peak_bytes: Peak of the backward beside the span's input. Includes the saved bytes,
            both gradients, and the parameter gradients that the span makes.
        forward_ms: Time of the forward.
        backward_ms: Time of the backward, recomputation included.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_ms: float
    backward_ms: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_numbers(self)
        if self.saved_bytes > self.forward_peak_bytes:
            raise ValueError(
                f"saved_bytes is {self.saved_bytes}; "
                f"it must be at most forward_peak_bytes, {self.forward_peak_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage, as it runs when it saves nothing.

    Attributes:
        input_bytes: The boundary ``x_s`` that enters the stage.
        output_gradient_bytes: ``d_s``, the gradient of the boundary that leaves the stage. For the
            last stage, the gradient of the chain's output, which counts from the start.
        forward_ms: Time of a forward that saves nothing.
        forward_peak_bytes: Peak of that forward beside the stage's input, the stage's output
            included.
        parameter_gradient_bytes: ``g_s``, live from the stage's backward to the end.
    """

    input_bytes: int
    output_gradient_bytes: int
    forward_ms: float
    forward_peak_bytes: int
    parameter_gradient_bytes: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages in forward order, and the options of every span that may be run as one.

    All sizes together are at most ``MAX_BYTES``.

    Attributes:
        stages: At least one stage.
        spans: ``(first, last)``, both inclusive, to the span's options. Every ``(s, s)`` is there,
            with the stage's own options; a span of several stages offers options that drop its
            inner boundaries.
    """

    stages: tuple[Stage, ...]
    spans: Mapping[tuple[int, int], tuple[Option, ...]]

    def __post_init__(self) -> None:
        """Check that the spans cover the chain and that sizes contain their boundaries."""
        num_stages = len(self.stages)
        if num_stages == 0:
            raise ValueError("the chain has 0 stages; it must have at least 1")
        for s in range(num_stages):
            if (s, s) not in self.spans:
                raise ValueError(f"stage {s} has no options; spans must hold ({s}, {s})")
        for s, stage in enumerate(self.stages):
            if stage.forward_peak_bytes < self.output_bytes(s):
                raise ValueError(
                    f"forward_peak_bytes of stage {s} is {stage.forward_peak_bytes}; "
                    f"it must be at least the stage's output, {self.output_bytes(s)}"
                )
        for (first, last), options in self.spans.items():
            if not 0 <= first <= last < num_stages:
                raise ValueError(
                    f"span ({first}, {last}) is no span of the stages 0 to {num_stages - 1}"
                )
            if not options:
                raise ValueError(f"span ({first}, {last}) has 0 options; it must have at least 1")
            for index, option in enumerate(options):
                if option.saved_bytes < self.output_bytes(last):
                    raise ValueError(
                        f"saved_bytes of option {index} of span ({first}, {last}) is "
                        f"{option.saved_bytes}; it must be at least the span's output, "
                        f"{self.output_bytes(last)}"
                    )
        check_size("the sum of the chain's sizes", self._peak_bound_bytes())

    def _peak_bound_bytes(self) -> int:
        """Return an upper bound on the peak of every sequence of any part of the chain.

        It adds up every boundary, all parameter gradients, the most that each stage may save as the
        first of a span, the largest gradient in hand and the largest peak of a step.
        """
        options = [option for at in self.spans.values() for option in at]
        saved = [0] * len(self.stages)
        for (first, _), at in self.spans.items():
            saved[first] = max(saved[first], *(option.saved_bytes for option in at))
        return (
            sum(stage.input_bytes + stage.parameter_gradient_bytes for stage in self.stages)
            + sum(saved)
            + max(stage.output_gradient_bytes for stage in self.stages)
            + max(
                *(stage.forward_peak_bytes for stage in self.stages),
                *(max(option.forward_peak_bytes, option.backward_peak_bytes) for option in options),
            )
        )

    def output_bytes(self, stage: int) -> int:
        """Return the size of the boundary that leaves ``stage``; 0 for the last stage."""
        return self.stages[stage + 1].input_bytes if stage + 1 < len(self.stages) else 0
