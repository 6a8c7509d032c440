"""The fastest plan within a limit on saved bytes, for one limit, for many, or for all useful ones.

Times and plans are asked for apart: a time alone needs no plan to be assembled and checked. Every
time is a lower bound. It is exact where the dynamic program (`frontier`) gets through. Else it
comes from the lower convex hull of the sum of the parts' Pareto sets, or, where there are none,
from the hull by minimum cuts (`hull`), which is known to `HULL_TOLERANCE`. A plan is the best where
the dynamic program gets through, else one of the hull's.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
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
    hull_positions,
    merge_fronts,
    part_fronts,
    recomputed_ops,
    sum_fronts,
)
from checkmate.hull import Hull, convex_hull, drop_dominated
from checkmate.problem import Knapsack, Solution, Status, check_limit, check_time_limit, no_plan
from checkmate.reduction import assemble, ms_of_ticks, reduce
from checkmate.verify import verify

# How far the hull by minimum cuts is known, as a share of the time between its two ends. A bound is
# lower by it.
HULL_TOLERANCE = 1e-3


def solve(problem: Knapsack, max_saved_bytes: int, *, time_limit_s: float = 10.0) -> Solution:
    """The fastest plan within a limit on saved bytes; the fewest saved bytes break ties.

    Args:
        problem: The values to save or recompute.
        max_saved_bytes: Limit on the saved bytes, forced values not counted.
        time_limit_s: Wall time after which the search stops, in seconds.

    Returns:
        A verified plan, or a solution without a plan whose status is `Status.INFEASIBLE`. Where the
        problem is too wide for the dynamic program, or time runs out, it is the best plan of the
        convex hull, as `Status.FEASIBLE`.

    Raises:
        ValueError: The limit is no whole number, or the time limit is not positive.
    """
    check_limit("max_saved_bytes", max_saved_bytes)
    check_time_limit(time_limit_s)
    begin = monotonic()
    curve = Curve(problem, time_limit_s=time_limit_s)
    plan = curve.plan(max_saved_bytes, time_limit_s=begin + time_limit_s - monotonic())
    return plan or no_plan(Status.INFEASIBLE)


class Curve:
    """Least recompute time, and the plan that takes it, for every limit on saved bytes.

    Attributes:
        is_cut_short: Whether a time limit, of the preparation or of an answer, left the answer to
            the convex hull.
    """

    def __init__(self, problem: Knapsack, *, time_limit_s: float = 10.0) -> None:
        """Prepares the parts.

        Args:
            problem: The values to save or recompute.
            time_limit_s: Wall time of the preparation, in seconds. After it, the convex hull
                answers.
        """
        self._problem = problem
        self._reduced = reduce(problem)
        self.is_cut_short = False
        self._fronts: tuple[Front, ...] | None = None
        self._hulls: Hulls | None = None
        self._last: tuple[int, Total] | None = None
        try:
            fronts = part_fronts(self._reduced, deadline=monotonic() + time_limit_s)
            self._reduced, self._fronts = merge_fronts(self._reduced, fronts)
            self._hulls = Hulls.of(self._fronts)
            self._hull_bytes, ticks = self._hulls.whole
            self._hull_ms = ms_of_ticks(problem, ticks.tolist())
        except (TooManyLabelsError, OutOfTimeError) as error:
            self.is_cut_short = isinstance(error, OutOfTimeError)
            points = self._hull.points[::-1]
            self._hull_bytes = np.array([saved_bytes for saved_bytes, _ in points])
            self._hull_ms = ms_of_ticks(problem, [ticks for _, ticks in points])

    def bound_ms(self, max_saved_bytes: int, *, time_limit_s: float = 10.0) -> float:
        """A lower bound on the time of plans within the limit, in milliseconds; infinite if none.

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
        hull_ms = float(np.interp(max_saved_bytes, self._hull_bytes, self._hull_ms))
        if self._fronts is not None:
            return hull_ms
        slowest_ms, fastest_ms = self._hull_ms[0], self._hull_ms[-1]
        return max(fastest_ms, hull_ms - HULL_TOLERANCE * (slowest_ms - fastest_ms))

    def hull_plan_ms(self, max_saved_bytes: int) -> float:
        """The time of the convex hull's fastest plan within the limit, in milliseconds.

        Infinite if there is no plan. The answer is immediate, and `bound_ms` is never above it.
        """
        within = int(np.searchsorted(self._hull_bytes, max_saved_bytes, side="right"))
        return float(self._hull_ms[within - 1]) if within else inf

    def plan(self, max_saved_bytes: int, *, time_limit_s: float = 10.0) -> Solution | None:
        """The fastest plan within the limit; None if there is no plan.

        After `time_limit_s` seconds of wall time, and where the problem is too wide, it is the
        fastest plan of the convex hull, with `Status.FEASIBLE`.

        Raises:
            ValueError: The limit is no whole number.
        """
        check_limit("max_saved_bytes", max_saved_bytes)
        if max_saved_bytes < self._hull_bytes[0]:
            return None
        total = self._best_within(max_saved_bytes, time_limit_s)
        if total is None or self._fronts is None:
            points = self._hull.points
            first = next(i for i, (size, _) in enumerate(points) if size <= max_saved_bytes)
            return replace(self._hull.plan(first), status=Status.FEASIBLE)
        recomputed = recomputed_ops(self._reduced, self._fronts, total, len(total.ticks) - 1)
        plan = assemble(self._problem, recomputed, Status.OPTIMAL)
        verify(self._problem, plan, max_saved_bytes=max_saved_bytes)
        return plan

    def _best_within(self, max_saved_bytes: int, time_limit_s: float) -> Total | None:
        """The dynamic program's answer; None if it does not get through."""
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
    def _hull(self) -> Hull:
        """The convex hull by minimum cuts, to `HULL_TOLERANCE`."""
        return Hull(self._problem, tolerance=HULL_TOLERANCE)


Points = Sequence[tuple[float, float]]


def pareto(
    problem: Knapsack, *, max_points: int = 16, time_limit_s: float = 10.0
) -> tuple[Solution, ...]:
    """Plans from the fastest down to the one that saves the fewest bytes.

    The dynamic program (`frontier`) gives the whole Pareto set, and the choice is made from it.
    Where that is too wide or too large, the choice is made from the convex hull (`hull`), which
    then has more points than are asked for, as a rule.

    Args:
        problem: The values to save or recompute.
        max_points: The most plans to return, at least 2. The whole Pareto set, if it has no more.
            Else both ends, the vertices of the lower convex hull as far as they fit, and points
            that split the widest gaps, in saved bytes or in time, each against its whole range.
            Where the problem is too wide for the dynamic program, points of the hull alone.
        time_limit_s: Wall time of the whole call, in seconds. The convex hull is always found.

    Returns:
        Verified plans of strictly falling saved bytes and strictly rising time, at least one. The
        first plan saves every required value or recomputes it at no cost. `Status.FEASIBLE` marks
        all plans if the time limit kept others from being found.

    Raises:
        ValueError: `max_points` is below 2, or the time limit is not positive.
    """
    check_time_limit(time_limit_s)
    if max_points < 2:
        raise ValueError(f"max_points is {max_points}; the least is 2 (both ends of the frontier)")
    deadline = monotonic() + time_limit_s
    reduced = reduce(problem)
    try:
        fronts = part_fronts(reduced, deadline=deadline)
        total = sum_fronts(fronts, deadline=deadline)
    except (TooManyLabelsError, OutOfTimeError) as error:
        hull = convex_hull(problem, choose=lambda points: choose_points(points, max_points))
        if isinstance(error, TooManyLabelsError):
            return hull
        return tuple(replace(plan, status=Status.FEASIBLE) for plan in hull)
    last = len(total.saved_bytes) - 1
    points = list(zip(total.saved_bytes[::-1].tolist(), total.ticks[::-1].tolist(), strict=True))
    plans = drop_dominated(
        assemble(problem, recomputed_ops(reduced, fronts, total, last - position), Status.OPTIMAL)
        for position in choose_points(points, max_points)
    )
    for plan in plans:
        verify(problem, plan)
    return tuple(plans)


def choose_points(points: Points, max_points: int) -> list[int]:
    """Choose points of a frontier: the ends, the hull as far as it fits, points in wide gaps.

    Args:
        points: (saved bytes, time) of strictly falling bytes and strictly rising time.
        max_points: The most points to choose, at least 2.

    Returns:
        Rising positions in `points`.
    """
    if len(points) <= max_points:
        return list(range(len(points)))
    chosen = [0, len(points) - 1]
    hull = hull_positions(points)
    if len(hull) <= max_points:
        chosen = hull
    else:
        _fill(points, chosen, hull, max_points)
    _fill(points, chosen, range(len(points)), max_points)
    return chosen


def _fill(points: Points, chosen: list[int], candidates: Sequence[int], max_points: int) -> None:
    """Add rising candidates to `chosen`, each near the middle of the widest gap that has one."""
    while len(chosen) < max_points:
        gaps = [
            (_gap(points, low, high), place)
            for place, (low, high) in enumerate(pairwise(chosen), start=1)
            if bisect_right(candidates, low) < bisect_left(candidates, high)
        ]
        if not gaps:
            return
        place = max(gaps, key=lambda gap: (gap[0], -gap[1]))[1]
        low, high = chosen[place - 1], chosen[place]
        inside = candidates[bisect_right(candidates, low) : bisect_left(candidates, high)]
        split = min(
            inside, key=lambda middle: max(_gap(points, low, middle), _gap(points, middle, high))
        )
        chosen.insert(place, split)


def _gap(points: Points, low: int, high: int) -> float:
    """Distance of two points: the larger share of the frontier's range, in bytes or in time."""
    (first_bytes, first_time), (last_bytes, last_time) = points[0], points[-1]
    (low_bytes, low_time), (high_bytes, high_time) = points[low], points[high]
    return max(
        (low_bytes - high_bytes) / (first_bytes - last_bytes),
        (high_time - low_time) / (last_time - first_time),
    )
