"""A chain of stages, which is the input of the solver, and the steps that run it, its output.

Stage ``s`` reads the boundary ``x_s`` and makes the boundary ``x_{s+1}``; the last stage makes the
chain's output. ``x_0``, the chain's input, is static: it is always live and never counted. The
backward pass visits the stages from last to first. At stage ``s`` it reads ``d_s``, the gradient of
the stage's output. All sizes are whole bytes and all times are milliseconds; this package does not
ask where they come from. Sizes contain the boundary that a stage makes, and their sum over a chain
is below 2**62: the solver adds them up as 64-bit integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


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


Chain = tuple[Stage, ...]
"""Stages in forward order, at least one."""


class Step(NamedTuple):
    """One run of one stage; ``str`` gives for example ``F3``.

    | kind | run |
    |---|---|
    | ``F`` | forward, which saves nothing but its output |
    | ``K`` | forward, which keeps all that its backward reads, its output included |
    | ``B`` | backward from what was kept, which is live until then; reads the stage's input again |
    """

    kind: Literal["F", "K", "B"]
    stage: int

    def __str__(self) -> str:
        """Return kind and stage."""
        return f"{self.kind}{self.stage}"


Sequence = tuple[Step, ...]
"""The steps of one training pass.

A boundary is live from the step that makes it to the last step that reads it before it is
recomputed. No step releases it by name.
"""
