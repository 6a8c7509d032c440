"""All useful levels of saved bytes of a problem, or a choice of them that covers the range.

The dynamic program (`frontier`) gives the whole Pareto set, and the choice is made from it. Where
that is too wide or too large, the choice is made from the convex hull (`hull`), which then has more
points than are asked for, as a rule.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import monotonic

from checkmate.frontier import (
    OutOfTimeError,
    TooManyLabelsError,
    hull_positions,
    part_fronts,
    recomputed_ops,
    sum_fronts,
)
from checkmate.hull import convex_hull, drop_dominated
from checkmate.problem import Knapsack, Solution, Status, check_time_limit
from checkmate.reduction import assemble, reduce
from checkmate.verify import verify

Points = Sequence[tuple[float, float]]


def pareto(
    problem: Knapsack, *, max_points: int = 16, time_limit_s: float = 10.0
) -> tuple[Solution, ...]:
    """Plans from the fastest down to the one that saves the fewest bytes.

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
