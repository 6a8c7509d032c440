"""All useful levels of saved bytes of a problem, or a choice of them that covers the range.

With the default backend, one dynamic program (`frontier`) gives the whole Pareto set, and the
choice is made from it. If that table would be too large, and with an ILP backend, the vertices of
the convex hull come first (`hull`). The widest gaps between known points are then bisected, with
one solve each. A level is skipped if a neighbour implies its answer: the plan for limit L with s
saved bytes is the best for every limit in [s, L].
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from time import monotonic

from checkmate.frontier import (
    Front,
    OutOfTimeError,
    TooManyLabelsError,
    hull_positions,
    part_fronts,
    recomputed_ops,
    sum_fronts,
)
from checkmate.hull import convex_hull, drop_dominated
from checkmate.problem import Knapsack, Solution, Status, no_plan
from checkmate.reduction import Reduced, assemble, reduce
from checkmate.solve import check_search, solve_by_fronts, solve_by_ilp
from checkmate.verify import verify

Points = Sequence[tuple[float, float]]


def pareto(
    problem: Knapsack,
    *,
    max_points: int = 16,
    time_limit_s: float = 10.0,
    backend: str | None = None,
) -> tuple[Solution, ...]:
    """Plans from the fastest down to the one that saves the fewest bytes.

    Args:
        problem: The values to save or recompute.
        max_points: The most plans to return, at least 2. The whole Pareto set, if it has no more.
            Else both ends, the vertices of the lower convex hull as far as they fit, and points
            that split the widest gaps, in saved bytes or in time, each against its whole range.
        time_limit_s: Wall time of the whole call, in seconds. The convex hull is always found.
        backend: As for `solve`.

    Returns:
        Verified plans of strictly falling saved bytes and strictly rising time, at least one. The
        first plan saves every required value or recomputes it at no cost. `Status.FEASIBLE` marks a
        plan of a stopped solver, and all plans if the time limit kept others from being found.

    Raises:
        ValueError: `max_points` is below 2, the time limit is not positive, or the backend is
            unknown.
    """
    check_search(time_limit_s, backend)
    if max_points < 2:
        raise ValueError(f"max_points is {max_points}; the least is 2 (both ends of the frontier)")
    deadline = monotonic() + time_limit_s

    def by_ilp(limit: int) -> Solution:
        return solve_by_ilp(
            problem, limit, deadline=deadline, backend=backend if backend == "highs" else "cbc"
        )

    if backend in ("cbc", "highs"):
        return _bisect(problem, by_ilp, max_points, deadline)
    reduced = reduce(problem)
    try:
        fronts = part_fronts(reduced, deadline=deadline)
    except TooManyLabelsError:
        return _bisect(problem, by_ilp, max_points, deadline)
    except OutOfTimeError:
        return _verified(problem, _without_proof(_chosen_hull_plans(problem, max_points)))

    def by_fronts(limit: int) -> Solution:
        try:
            return solve_by_fronts(problem, reduced, fronts, limit, deadline=deadline)
        except TooManyLabelsError:
            return by_ilp(limit)
        except OutOfTimeError:
            return no_plan(Status.NOT_FOUND)

    try:
        return _from_table(problem, reduced, fronts, max_points, deadline)
    except (TooManyLabelsError, OutOfTimeError):
        return _bisect(problem, by_fronts, max_points, deadline)


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


def _from_table(
    problem: Knapsack, reduced: Reduced, fronts: tuple[Front, ...], max_points: int, deadline: float
) -> tuple[Solution, ...]:
    """A choice from the whole Pareto set.

    Raises:
        TooManyLabelsError: It is too large to list.
        OutOfTimeError: The deadline passed.
    """
    total = sum_fronts(fronts, deadline=deadline)
    size = len(total.saved_bytes)
    points = list(zip(total.saved_bytes[::-1].tolist(), total.ticks[::-1].tolist(), strict=True))
    plans = [
        assemble(
            problem, recomputed_ops(reduced, fronts, total, size - 1 - position), Status.OPTIMAL
        )
        for position in choose_points(points, max_points)
    ]
    return _verified(problem, plans)


def _chosen_hull_plans(problem: Knapsack, max_points: int) -> list[Solution]:
    """A choice of the plans on the convex hull."""
    return list(convex_hull(problem, choose=lambda points: choose_points(points, max_points)))


def _bisect(
    problem: Knapsack, best_within: Callable[[int], Solution], max_points: int, deadline: float
) -> tuple[Solution, ...]:
    """Start from the convex hull and split the widest gaps, one solve each."""
    plans = _chosen_hull_plans(problem, max_points)
    closed: set[int] = set()
    while len(plans) < max_points:
        points = [(plan.saved_bytes, plan.time_ms) for plan in plans]
        open_gaps = [
            (_gap(points, place - 1, place), -place)
            for place in range(1, len(plans))
            if plans[place - 1].saved_bytes not in closed
            and plans[place - 1].saved_bytes - plans[place].saved_bytes > 1
        ]
        if not open_gaps:
            break
        if monotonic() >= deadline:
            plans = _without_proof(plans)
            break
        place = -max(open_gaps)[1]
        above, below = plans[place - 1], plans[place]
        found = best_within((above.saved_bytes + below.saved_bytes) // 2)
        if not (
            found.found and below.saved_bytes < found.saved_bytes and found.time_ms < below.time_ms
        ):
            # No plan in the lower half beats `below`. What remains lies just under `above`.
            found = best_within(above.saved_bytes - 1)
            if found.status is Status.NOT_FOUND:
                plans = _without_proof(plans)
                break
            closed.add(above.saved_bytes)
        if found.found and below.saved_bytes < found.saved_bytes < above.saved_bytes:
            plans = drop_dominated([*plans, found])
    return _verified(problem, plans)


def _without_proof(plans: Sequence[Solution]) -> list[Solution]:
    """The plans, marked as possibly incomplete: the time limit may have left out others."""
    return [replace(plan, status=Status.FEASIBLE) for plan in plans]


def _verified(problem: Knapsack, plans: Sequence[Solution]) -> tuple[Solution, ...]:
    falling = drop_dominated(plans)
    for plan in falling:
        verify(problem, plan)
    return tuple(falling)
