"""When the search for a plan ends: near enough to the lower bound, or out of time."""

from __future__ import annotations

import math
from time import monotonic

from rockmate.planning.options import PlanOptions

_DEFAULT = PlanOptions().gap_tolerance


class StoppingRule:
    """The rule that all searches of a planner share.

    Attributes:
        gap_tolerance: a schedule is good enough if its time is at most the lower bound and this
            fraction of the baseline's time.
        time_limit_s: wall time of the search for one plan, in seconds.
    """

    def __init__(
        self,
        gap_tolerance: float = _DEFAULT,
        time_limit_s: float = math.inf,
    ) -> None:
        """Starts with nothing spent; both are above 0."""
        self.gap_tolerance, self.time_limit_s = gap_tolerance, time_limit_s
        self._deadline = math.inf

    @property
    def is_late(self) -> bool:
        """Whether the time of the present plan is over."""
        return monotonic() >= self._deadline

    def begin(self, num_plans: int = 1) -> None:
        """Starts the clock for one plan, or for so many that are made together."""
        self._deadline = monotonic() + num_plans * self.time_limit_s
