"""The lower convex hull of (saved bytes, time) of a whole problem: its plans, and lower bounds.

The hull of the whole is the Minkowski sum of the hulls of its parts (`hull.part_hull`): all their
steps, the least time for each spared byte first. No plan lies below it, so it bounds the time of
every plan within a limit. Each plan on it is the fastest for its own saved bytes.

Plans above the hull are not looked for. Between two plans of the hull there may be one that is
faster than the leaner of them; to find it is NP-hard.
"""

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import inf

import numpy as np

from checkmate.hull import part_hull
from checkmate.problem import Knapsack, Solution
from checkmate.reduction import assemble, ms_of_ticks, reduce

# Most ops of a part whose hull is found exactly. Hybrid models have parts of a thousand ops with a
# thousand vertices, of which some tens give the hull to 1e-3 of its range.
_MAX_EXACT_OPS = 200
# How far the hull of a larger part is known, as a share of the time between its two ends.
_TOLERANCE = 1e-3

Points = Sequence[tuple[int, int]]


class Curve:
    """Plans and lower bounds for every limit on saved bytes, prepared once.

    Attributes:
        points: (saved bytes, ticks) of the plans on the lower convex hull, of strictly falling
            bytes and strictly rising ticks. Every vertex is among them, but for vertices of large
            parts that lie within a tolerance of others. Other points lie on the hull's edges:
            there, several parts have equal price, and some of them have moved.
    """

    def __init__(self, problem: Knapsack) -> None:
        """Finds the points; whole models of some thousands of ops are fine."""
        self._problem, self._reduced = problem, reduce(problem)
        parts = [
            (part, 0.0 if len(part.ops) <= _MAX_EXACT_OPS else _TOLERANCE)
            for part in self._reduced.parts
        ]
        self._hulls = [part_hull(part.ops, tolerance) for part, tolerance in parts]
        self._walk = _merge_steps(
            [[(vertex.saved_bytes, vertex.ticks) for vertex in hull] for hull in self._hulls]
        )
        saved_bytes = sum(hull[0].saved_bytes for hull in self._hulls)
        ticks = sum(hull[0].ticks for hull in self._hulls)
        self.points = [(saved_bytes, ticks)]
        for which, to in self._walk:
            before, after = self._hulls[which][to - 1 : to + 1]
            saved_bytes += after.saved_bytes - before.saved_bytes
            ticks += after.ticks - before.ticks
            self.points.append((saved_bytes, ticks))
        self._saved_bytes, self._ticks = np.array(self.points[::-1], dtype=np.float64).T
        self._unknown_ticks = sum(
            tolerance * (hull[-1].ticks - hull[0].ticks)
            for hull, (_, tolerance) in zip(self._hulls, parts, strict=True)
        )

    def bound_ms(self, max_saved_bytes: int) -> float:
        """A lower bound on the milliseconds of plans within the limit; infinite if none."""
        least_bytes, fastest_ticks = self.points[-1][0], self.points[0][1]
        if max_saved_bytes < least_bytes:
            return inf
        on_hull = float(np.interp(float(max_saved_bytes), self._saved_bytes, self._ticks))
        return ms_of_ticks(self._problem, max(fastest_ticks, on_hull - self._unknown_ticks))

    def plan(self, max_saved_bytes: int) -> Solution | None:
        """The fastest plan of the hull within the limit; None if no plan saves so few bytes."""
        position = bisect_left(self.points, -max_saved_bytes, key=lambda point: -point[0])
        return self.plan_at(position) if position < len(self.points) else None

    def plan_at(self, position: int) -> Solution:
        """The plan of a point."""
        reached = [0] * len(self._hulls)
        for which, to in self._walk[:position]:
            reached[which] = to
        recomputed = set(self._reduced.free)
        for part, hull, to in zip(self._reduced.parts, self._hulls, reached, strict=True):
            recomputed.update(part.indices[i] for i in hull[to].recomputed)
        return assemble(self._problem, recomputed)

    def plans(self, max_points: int | None = None) -> tuple[Solution, ...]:
        """Plans of the hull, from the fastest down to that of the fewest saved bytes.

        Args:
            max_points: The most plans to return, at least 2: both ends, and points that split the
                widest gaps, in saved bytes or in time, each against its whole range. None for all.

        Returns:
            Plans of strictly falling saved bytes and strictly rising time, at least one.
            The first plan saves every required value or recomputes it at no cost.
        """
        plans = map(self.plan_at, choose_points(self.points, max_points))
        kept: list[Solution] = []
        for plan in sorted(plans, key=lambda plan: (plan.saved_bytes, plan.time_ms)):
            if not kept or plan.time_ms < kept[-1].time_ms:  # ticks may differ where floats do not
                kept.append(plan)
        return tuple(reversed(kept))


def choose_points(points: Points, max_points: int | None) -> list[int]:
    """Rising positions of at most so many points: the ends, and those that split wide gaps."""
    if max_points is None or len(points) <= max_points:
        return list(range(len(points)))
    chosen = [0, len(points) - 1]
    (most_bytes, least_ticks), (least_bytes, most_ticks) = points[0], points[-1]

    def gap(low: int, high: int) -> float:
        """Distance of two points: the larger share of the range, in bytes or in time."""
        return max(
            (points[low][0] - points[high][0]) / (most_bytes - least_bytes),
            (points[high][1] - points[low][1]) / (most_ticks - least_ticks),
        )

    while len(chosen) < max_points:
        gaps = [(gap(*ends), ends) for ends in pairwise(chosen) if ends[1] - ends[0] > 1]
        low, high = max(gaps, key=lambda each: each[0])[1]
        middle = min(
            range(low + 1, high), key=lambda middle: max(gap(low, middle), gap(middle, high))
        )
        chosen.insert(bisect_left(chosen, middle), middle)
    return chosen


def _merge_steps(hulls: Sequence[Points]) -> list[tuple[int, int]]:
    """The steps of several hulls in one order: the least time for each spared byte first.

    They are pairs (part, index of the vertex that the step reaches). Ties go to the earlier part.
    """
    steps = [
        (Fraction(after[1] - before[1], before[0] - after[0]), which, to)
        for which, points in enumerate(hulls)
        for to, (before, after) in enumerate(pairwise(points), start=1)
    ]
    return [(which, to) for _, which, to in sorted(steps)]
