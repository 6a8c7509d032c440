"""Which budget of a curve of time against memory to take: the knee, or the least within a slowdown.

The lower convex hull of the points is what mixtures of them reach. Scaled so that its ends lie at
(0, 1) and (1, 0), the knee is the hull's point farthest below the straight line between the ends,
as in Kneedle (Satopaa et al., "Finding a 'Kneedle' in a Haystack", 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]

SLOWDOWN = 1.05
"""The slowdown that is recommended where a curve has no knee."""


# Least distance of a knee below the line, in time, as a share of the time between the curve's ends.
_MIN_DEPTH = 0.05


def knee(points: Sequence[Point]) -> int | None:
    """Index of the knee of falling time over growing memory; None if there is none.

    Args:
        points: (memory, time), in any order and any units; points that others beat in both are
            never the knee.
    """
    hull = lower_hull(points)
    if len(hull) < 3:
        return None
    (left, top), (right, bottom) = points[hull[0]], points[hull[-1]]

    def depth(index: int) -> float:
        memory, time = points[index]
        return 1 - (memory - left) / (right - left) - (time - bottom) / (top - bottom)

    deepest = max(hull, key=depth)
    return deepest if depth(deepest) >= _MIN_DEPTH else None


def least_within(points: Sequence[Point], max_slowdown: float) -> int | None:
    """Index of the least memory whose time ratio is within a slowdown; None if there is none."""
    fast = (index for index, (_, ratio) in enumerate(points) if ratio <= max_slowdown)
    return min(fast, key=points.__getitem__, default=None)


def recommended(points: Sequence[Point]) -> int | None:
    """Index of the point to begin with: the knee, else the least within `SLOWDOWN`."""
    found = knee(points)
    return least_within(points, SLOWDOWN) if found is None else found


def lower_hull(points: Sequence[Point]) -> list[int]:
    """Indices of the lower convex hull from the least memory to the least time (monotone chain)."""
    hull: list[int] = []
    for index in sorted(range(len(points)), key=points.__getitem__):
        memory, time = points[index]
        if hull and time >= points[hull[-1]][1]:
            continue
        while len(hull) >= 2:
            (left, above), (right, below) = (points[each] for each in hull[-2:])
            if (above - below) * (memory - right) > (below - time) * (right - left):
                break
            hull.pop()
        hull.append(index)
    return hull
