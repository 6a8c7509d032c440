"""The output of the solver: the steps of one training pass over a chain, in order.

A boundary is live from the step that makes it to the last step that reads it before it is
recomputed. No step releases it by name. ``ForwardOnly(s)`` reads ``x_s`` and makes ``x_{s+1}``.
``ForwardKeep`` reads ``x_first`` and makes the values that its option saves, ``x_{last+1}``
included. They are live until the ``Backward`` of the same span and option, which reads ``x_first``
once more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardOnly:
    """Run one stage forward and save nothing of it but its output."""

    stage: int

    def __str__(self) -> str:
        """Return for example ``F3``."""
        return f"F{self.stage}"


@dataclass(frozen=True, slots=True)
class ForwardKeep:
    """Run the span ``first`` to ``last`` forward and keep the values that ``option`` saves."""

    first: int
    last: int
    option: int

    def __str__(self) -> str:
        """Return for example ``K3.0``, or ``K3-5.0`` for a span of several stages."""
        return f"K{_span_text(self.first, self.last)}.{self.option}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the span ``first`` to ``last`` backward from the values that ``option`` saved."""

    first: int
    last: int
    option: int

    def __str__(self) -> str:
        """Return for example ``B3.0``, or ``B3-5.0`` for a span of several stages."""
        return f"B{_span_text(self.first, self.last)}.{self.option}"


def _span_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


Step = ForwardOnly | ForwardKeep | Backward


@dataclass(frozen=True, slots=True)
class Sequence:
    """The steps of one training pass; ``str`` gives for example ``F0 K1.0 B1.0 K0.0 B0.0``."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """Return the steps in one line."""
        return " ".join(map(str, self.steps))
