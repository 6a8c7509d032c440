"""The least recompute time of one problem as a function of the limit on saved bytes, prepared once for many limits.

Where only the time is asked for, no plan has to be put together or checked. The answer is a lower bound in every case: exact
where the dynamic program (`frontier`) gets through, else the lower convex hull of the sum of the parts' Pareto sets, else of
minimum cuts (`hull`), both of which no plan beats.
"""

from math import inf
from time import monotonic

import numpy as np

from checkmate.frontier import Front, Hulls, OutOfTimeError, TooManyLabelsError, best_within, part_fronts
from checkmate.hull import convex_hull
from checkmate.problem import Knapsack
from checkmate.reduction import ms_of_ticks, reduce


class Curve:
    """Least recompute time for every limit on saved bytes.

    Attributes:
        is_cut_short: Whether a time limit, here or in `bound_ms`, has left the convex hull to answer.
    """

    def __init__(self, problem: Knapsack, *, time_limit_s: float = 10.0) -> None:
        """Prepares the parts.

        Args:
            problem: What may be saved or recomputed.
            time_limit_s: Wall time for this, in seconds, after which the convex hull is all there is.
        """
        self._problem = problem
        self.is_cut_short = False
        self._fronts: tuple[Front, ...] | None = None
        self._hulls: Hulls | None = None
        try:
            self._fronts = part_fronts(reduce(problem), deadline=monotonic() + time_limit_s)
            self._hulls = Hulls.of(self._fronts)
            self._hull_bytes, ticks = self._hulls.whole
            self._hull_ms = ms_of_ticks(problem, ticks.tolist())
        except (TooManyLabelsError, OutOfTimeError) as error:
            self.is_cut_short = isinstance(error, OutOfTimeError)
            plans = convex_hull(problem)[::-1]
            self._hull_bytes = np.array([plan.saved_bytes for plan in plans])
            self._hull_ms = [plan.time_ms for plan in plans]

    def bound_ms(self, max_saved_bytes: int, *, time_limit_s: float = 10.0) -> float:
        """A time that no plan within the limit beats, in milliseconds; infinite if there is no plan.

        After `time_limit_s` seconds of wall time the convex hull answers.
        """
        if max_saved_bytes < self._hull_bytes[0]:
            return inf
        if self._fronts is not None:
            try:
                total = best_within(
                    self._fronts, max_saved_bytes, deadline=monotonic() + time_limit_s, hulls=self._hulls
                )
                return ms_of_ticks(self._problem, [int(total.ticks[-1])])[0]
            except TooManyLabelsError:
                pass
            except OutOfTimeError:
                self.is_cut_short = True
        return float(np.interp(max_saved_bytes, self._hull_bytes, self._hull_ms))
