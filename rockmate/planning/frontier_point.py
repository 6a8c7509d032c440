"""A point of the curve of time against memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The peak and time of the plan for one budget.

    Attributes:
        budget_bytes: the budget.
        predicted_peak_bytes: the peak of its plan, at most the budget.
        predicted_ms: the time of one forward and backward, in milliseconds.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_ms: float
