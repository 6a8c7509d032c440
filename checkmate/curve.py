"""One problem for many limits on saved bytes, prepared once.

Where only the time is asked for, no plan has to be put together or checked. The answer is a lower bound in every case: exact
where the dynamic program (`frontier`) gets through, else the lower convex hull of the sum of the parts' Pareto sets, else of
minimum cuts (`hull`), both of which no plan beats. A plan is the best where the program gets through, else one of the hull's.
"""

from dataclasses import replace
from functools import cached_property
from math import inf
from time import monotonic

import numpy as np

from checkmate.frontier import (
    Front,
    Hulls,
    OutOfTimeError,
    TooManyLabelsError,
    Total,
    best_within,
    part_fronts,
    put_together,
    recomputed_ops,
)
from checkmate.hull import convex_hull
from checkmate.problem import Knapsack, Solution, Status, check_limit
from checkmate.reduction import assemble, ms_of_ticks, reduce
from checkmate.verify import verify


class Curve:
    """Least recompute time, and the plan that takes it, for every limit on saved bytes.

    Attributes:
        is_cut_short: Whether a time limit, here or for one limit on bytes, has left the convex hull to answer.
    """

    def __init__(self, problem: Knapsack, *, time_limit_s: float = 10.0) -> None:
        """Prepares the parts.

        Args:
            problem: What may be saved or recomputed.
            time_limit_s: Wall time for this, in seconds, after which the convex hull is all there is.
        """
        self._problem = problem
        self._reduced = reduce(problem)
        self.is_cut_short = False
        self._fronts: tuple[Front, ...] | None = None
        self._hulls: Hulls | None = None
        self._last: tuple[int, Total] | None = None
        try:
            fronts = part_fronts(self._reduced, deadline=monotonic() + time_limit_s)
            self._reduced, self._fronts = put_together(self._reduced, fronts)
            self._hulls = Hulls.of(self._fronts)
            self._hull_bytes, ticks = self._hulls.whole
            self._hull_ms = ms_of_ticks(problem, ticks.tolist())
        except (TooManyLabelsError, OutOfTimeError) as error:
            self.is_cut_short = isinstance(error, OutOfTimeError)
            plans = self._hull_plans
            self._hull_bytes = np.array([plan.saved_bytes for plan in plans])
            self._hull_ms = [plan.time_ms for plan in plans]

    def bound_ms(self, max_saved_bytes: int, *, time_limit_s: float = 10.0) -> float:
        """A time that no plan within the limit beats, in milliseconds; infinite if there is no plan.

        After `time_limit_s` seconds of wall time the convex hull answers.

        Raises:
            ValueError: The limit is no whole number.
        """
        check_limit("max_saved_bytes", max_saved_bytes)
        if max_saved_bytes < self._hull_bytes[0]:
            return inf
        total = self._best_within(max_saved_bytes, time_limit_s)
        if total is not None:
            return ms_of_ticks(self._problem, [int(total.ticks[-1])])[0]
        return float(np.interp(max_saved_bytes, self._hull_bytes, self._hull_ms))

    def hull_plan_ms(self, max_saved_bytes: int) -> float:
        """The time of the fastest plan of the convex hull within the limit, in milliseconds; infinite if there is no plan.

        Read off at once; `bound_ms` is never above it.
        """
        within = int(np.searchsorted(self._hull_bytes, max_saved_bytes, side="right"))
        return float(self._hull_ms[within - 1]) if within else inf

    def plan(self, max_saved_bytes: int, *, time_limit_s: float = 10.0) -> Solution | None:
        """The fastest plan within the limit, or the fastest of the convex hull where that cannot be told; None if there is no plan.

        The hull answers, with `Status.FEASIBLE`, after `time_limit_s` seconds of wall time and where the problem is too wide.

        Raises:
            ValueError: The limit is no whole number.
        """
        check_limit("max_saved_bytes", max_saved_bytes)
        if max_saved_bytes < self._hull_bytes[0]:
            return None
        total = self._best_within(max_saved_bytes, time_limit_s)
        if total is None or self._fronts is None:
            within = [plan for plan in self._hull_plans if plan.saved_bytes <= max_saved_bytes]
            return replace(within[-1], status=Status.FEASIBLE)
        recomputed = recomputed_ops(self._reduced, self._fronts, total, len(total.ticks) - 1)
        plan = assemble(self._problem, recomputed, Status.OPTIMAL)
        verify(self._problem, plan, max_saved_bytes=max_saved_bytes)
        return plan

    def _best_within(self, max_saved_bytes: int, time_limit_s: float) -> Total | None:
        """What the dynamic program says, None where it does not get through."""
        if self._fronts is None:
            return None
        if self._last is None or self._last[0] != max_saved_bytes:
            deadline = monotonic() + time_limit_s
            try:
                self._last = (
                    max_saved_bytes,
                    best_within(
                        self._fronts, max_saved_bytes, deadline=deadline, hulls=self._hulls
                    ),
                )
            except TooManyLabelsError:
                return None
            except OutOfTimeError:
                self.is_cut_short = True
                return None
        return self._last[1]

    @cached_property
    def _hull_plans(self) -> tuple[Solution, ...]:
        """The plans of the convex hull, from the least bytes to the least time."""
        return convex_hull(self._problem)[::-1]
