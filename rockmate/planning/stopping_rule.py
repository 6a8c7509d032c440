"""When the search for a plan ends: near enough to the lower bound, or out of time."""

from __future__ import annotations

import math
from time import monotonic
from typing import Any

# Distance to the lower bound, as a fraction of the baseline's time, at which a search ends.
DEFAULT_GAP_TOLERANCE = 1e-3


class StoppingRule:
    """The rule that all searches of a planner share.

    Attributes:
        gap_tolerance: a schedule is good enough if its time is at most the lower bound and this
            fraction of the baseline's time.
        time_limit_s: wall time of the search for one plan, in seconds.
    """

    def __init__(
        self,
        gap_tolerance: float = DEFAULT_GAP_TOLERANCE,
        time_limit_s: float = math.inf,
    ) -> None:
        """Starts with nothing spent.

        Args:
            gap_tolerance: above 0.
            time_limit_s: above 0.

        Raises:
            TypeError: one of them is no number.
            ValueError: one of them is not above 0, or is not a number (NaN).
        """
        self.gap_tolerance = _positive("gap_tolerance", gap_tolerance, example="1e-3")
        self.time_limit_s = _positive("time_limit_s", time_limit_s, example="30.0")
        self._deadline = math.inf

    @property
    def is_late(self) -> bool:
        """Whether the time of the present plan is over."""
        return monotonic() >= self._deadline

    def begin(self, num_plans: int = 1) -> None:
        """Starts the clock for one plan, or for so many that are made together."""
        self._deadline = monotonic() + num_plans * self.time_limit_s


def _positive(name: str, value: Any, *, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"{name} is {value!r}; give a number above 0, such as {example}"
        raise TypeError(msg)
    if not value > 0:
        msg = f"{name} is {value}; it must be above 0, such as {example}"
        raise ValueError(msg)
    return float(value)
