"""Where a curve of time against memory bends: the budgets that are worth a look.

The lower convex hull of the points is what mixtures of them reach. Scaled so that its ends lie at
(0, 1) and (1, 0), the first knee is the hull's point farthest below the straight line between the
ends, as in Kneedle (Satopaa et al., "Finding a 'Kneedle' in a Haystack", 2011); each further one is
the point farthest below the lines through those found so far (Douglas and Peucker's choice of the
few points that describe a line best). A point closer to its line than `min_depth` is no knee.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from checkmate.frontier import hull_positions

Point = tuple[float, float]


def knees(points: Sequence[Point], *, max_num: int = 3, min_depth: float = 0.05) -> list[int]:
    """Indices of the knees of falling time over growing memory, in the order of memory.

    Args:
        points: (memory, time), in any order and any units; points that others beat in both are
            never knees.
        max_num: how many at most.
        min_depth: least distance below its line, in time, as a share of the time between the ends
            of the curve.
    """
    hull = lower_hull(points)
    if len(hull) < 3:
        return []
    (left, top), (right, bottom) = points[hull[0]], points[hull[-1]]
    scaled = [
        ((points[index][0] - left) / (right - left), (points[index][1] - bottom) / (top - bottom))
        for index in hull
    ]
    corners = [0, len(hull) - 1]
    for _ in range(max_num):
        depth, vertex = max(
            (_depth(scaled[vertex], scaled[first], scaled[last]), vertex)
            for first, last in pairwise(corners)
            for vertex in range(first, last + 1)
        )
        if depth < min_depth:
            break
        corners = sorted([*corners, vertex])
    return [hull[corner] for corner in corners[1:-1]]


def lower_hull(points: Sequence[Point]) -> list[int]:
    """Indices of the lower convex hull from the least memory to the least time."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    falling = front[::-1]
    return [falling[place] for place in hull_positions([points[i] for i in falling])][::-1]


def _depth(point: Point, first: Point, last: Point) -> float:
    share = (point[0] - first[0]) / (last[0] - first[0])
    return first[1] + share * (last[1] - first[1]) - point[1]
