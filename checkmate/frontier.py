"""The whole Pareto set of (saved bytes, time), exactly, by dynamic programming over labels.

Within a part (`reduction.Part`) the ops are swept in reverse topological order. A *label* is a choice for the
ops swept so far: its bytes, its ticks, and its *state*, the set of links that a recomputed op reads and whose
maker is still to come. At each op a label either keeps the op's required and needed outputs (bytes) or
recomputes it (ticks, and its own links become needed). Of two labels in one state the dominated one is
dropped (the list method of Nemhauser and Ullmann, 1969, along a path decomposition), so time grows with the
number of open links, small in practice, and with the number of Pareto points.

The parts' sets are then summed one part at a time. For one limit, labels are also dropped when even the
convex hull of the parts to come cannot bring them under the best known plan, which leaves few; fewer still where a
plan is first sought that is nearer to the hull than the known one, which if there is any is the best.

Optimal always. It refuses (`TooManyLabelsError`) rather than run for long: the refusal depends on the input
alone, never on the clock, so the same input takes the same way. NP-hardness shows as that refusal; the ILP
takes over there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from checkmate.hull import descend
from checkmate.reduction import Part, PartOp, Reduced

_PART_LABELS = 1 << 16
_SUM_LABELS = 1 << 18
_POINTS_TOGETHER = 64  # of parts that are put together: fewer parts, each of more points
_SHARES_OF_GAP = (
    0.05,
    0.3,
    1.0,
)  # from the hull to a plan that is known, looked at in turn: the best plan is seldom far from the hull
_MAX_OPEN_LINKS = 62
_MAX_BYTES = 1 << 61

Ints = NDArray[np.int64]


class TooManyLabelsError(Exception):
    """The exact sweep would outgrow its bound; another method is needed."""


class OutOfTimeError(Exception):
    """The deadline passed during the sweep."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Front:
    """The Pareto set of a part.

    Attributes:
        saved_bytes: Strictly rising.
        ticks: Strictly falling.
        recomputed: For each point, which ops of the part run again; shape (points, ops).
    """

    saved_bytes: Ints
    ticks: Ints
    recomputed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Total:
    """Labels of the sum over all parts, with what is needed to tell the choice behind each.

    Attributes:
        saved_bytes: Strictly rising.
        ticks: Strictly falling.
        history: For each part, each label's predecessor and the point of the part that it took.
    """

    saved_bytes: Ints
    ticks: Ints
    history: tuple[tuple[Ints, Ints], ...]


def part_fronts(reduced: Reduced, *, deadline: float) -> tuple[Front, ...]:
    """The Pareto set of every part; equal parts are solved once.

    Args:
        reduced: The parts.
        deadline: When to give up, in seconds of `time.monotonic`.

    Raises:
        TooManyLabelsError: A part is too wide for the sweep.
        OutOfTimeError: The deadline passed.
    """
    known: dict[tuple[PartOp, ...], Front] = {}
    for part in reduced.parts:
        if part.ops not in known:
            known[part.ops] = _sweep(part, deadline)
    return tuple(known[part.ops] for part in reduced.parts)


def put_together(reduced: Reduced, fronts: Sequence[Front]) -> tuple[Reduced, tuple[Front, ...]]:
    """The same problem in fewer parts, as long as their Pareto sets stay short: less to sum at each of many limits.

    Args:
        reduced: The parts.
        fronts: Their Pareto sets.

    Returns:
        Parts, each of one or several of those given, equal ones first of all, and their Pareto sets. Both lose nothing.
    """
    kinds: dict[tuple[PartOp, ...], list[int]] = {}
    for number, part in enumerate(reduced.parts):
        kinds.setdefault(part.ops, []).append(number)
    parts: list[Part] = []
    together: list[Front] = []
    for number in (number for equal in kinds.values() for number in equal):
        part, front = reduced.parts[number], fronts[number]
        both = _both(together[-1], front) if together else None
        if both is None or len(both.saved_bytes) > _POINTS_TOGETHER:
            parts.append(part)
            together.append(front)
        else:
            parts[-1] = Part(ops=parts[-1].ops + part.ops, indices=parts[-1].indices + part.indices)
            together[-1] = both
    return Reduced(free=reduced.free, parts=tuple(parts)), tuple(together)


def _both(one: Front, other: Front) -> Front | None:
    """The Pareto set of two parts; None where there are too many pairs to look at."""
    num_others = len(other.saved_bytes)
    if len(one.saved_bytes) * num_others > _POINTS_TOGETHER**2:
        return None
    saved_bytes = np.add.outer(one.saved_bytes, other.saved_bytes).ravel()
    ticks = np.add.outer(one.ticks, other.ticks).ravel()
    keep = _useful(saved_bytes, ticks)
    return Front(
        saved_bytes=saved_bytes[keep],
        ticks=ticks[keep],
        recomputed=np.hstack(
            [one.recomputed[keep // num_others], other.recomputed[keep % num_others]]
        ),
    )


def sum_fronts(fronts: Sequence[Front], *, deadline: float) -> Total:
    """The Pareto set of the whole: every useful level.

    Raises:
        TooManyLabelsError: There are too many levels to list.
        OutOfTimeError: The deadline passed.
    """
    return _sum(fronts, None, deadline)


def best_within(
    fronts: Sequence[Front], max_saved_bytes: int, *, deadline: float, hulls: "Hulls | None" = None
) -> Total:
    """Labels of which the last is the fastest within a limit, of the fewest bytes; none if there is no plan.

    Args:
        fronts: The parts' Pareto sets.
        max_saved_bytes: The limit.
        deadline: When to give up, in seconds of `time.monotonic`.
        hulls: Of these fronts, where many limits are asked for.

    Raises:
        TooManyLabelsError: The bound leaves too many labels.
        OutOfTimeError: The deadline passed.
    """
    hulls, limit = hulls or Hulls.of(fronts), min(max_saved_bytes, _MAX_BYTES)
    for share in _SHARES_OF_GAP:
        total = _sum(fronts, _Bound(hulls, limit, share), deadline)
        if len(total.ticks):
            break
    return total


def recomputed_ops(reduced: Reduced, fronts: Sequence[Front], total: Total, label: int) -> set[int]:
    """The ops of the problem that a label of the sum recomputes."""
    chosen = set(reduced.free)
    for part, front, (parent, point) in reversed(
        list(zip(reduced.parts, fronts, total.history, strict=True))
    ):
        chosen.update(part.indices[i] for i in np.flatnonzero(front.recomputed[point[label]]))
        label = int(parent[label])
    return chosen


def _sweep(part: Part, deadline: float) -> Front:
    if sum(op.kept_bytes + sum(op.link_bytes) for op in part.ops) >= _MAX_BYTES:
        raise TooManyLabelsError
    state, saved, ticks = (np.zeros(1, dtype=np.int64) for _ in range(3))
    history: list[tuple[Ints, NDArray[np.bool_]]] = []
    bit_of: dict[int, int] = {}
    idle_bits = [1 << i for i in reversed(range(_MAX_OPEN_LINKS))]
    for op in reversed(part.ops):
        for link in op.links_in:
            if link not in bit_of:
                if not idle_bits:
                    raise TooManyLabelsError
                bit_of[link] = idle_bits.pop()
        made_bits = [bit_of.pop(link) for link in op.links_out]
        idle_bits += made_bits
        rest = state & ~sum(made_bits)
        kept = saved + op.kept_bytes
        for bit, size in zip(made_bits, op.link_bytes, strict=True):
            kept += np.where(state & bit, size, 0)
        labels = np.arange(len(state))
        if op.recomputable:
            reads = sum(bit_of[link] for link in op.links_in)
            rest = np.concatenate((rest, rest | reads))
            saved = np.concatenate((kept, saved))
            ticks = np.concatenate((ticks, ticks + op.ticks))
            labels = np.concatenate((labels, labels))
        else:
            saved = kept
        redone = np.arange(len(labels)) >= len(state)
        keep = _undominated(rest, saved, ticks)
        state, saved, ticks = rest[keep], saved[keep], ticks[keep]
        history.append((labels[keep], redone[keep]))
        if len(state) > _PART_LABELS:
            raise TooManyLabelsError
        if monotonic() > deadline:
            raise OutOfTimeError
    recomputed = np.zeros((len(state), len(part.ops)), dtype=np.bool_)
    label = np.arange(len(state))
    for position, (parent, redone) in enumerate(reversed(history)):
        recomputed[:, position] = redone[label]
        label = parent[label]
    return Front(saved_bytes=saved, ticks=ticks, recomputed=recomputed)


def _undominated(state: Ints, saved: Ints, ticks: Ints) -> Ints:
    """Indices of the labels that none of the same state beats, by state, then rising bytes, falling ticks."""
    order = np.lexsort((ticks, saved, state))
    state, ticks = state[order], ticks[order]
    new_state = np.empty(len(order), dtype=np.bool_)
    new_state[0] = True
    np.not_equal(state[1:], state[:-1], out=new_state[1:])
    # Later states get lower numbers, so that a running minimum starts afresh with each.
    shifted = ticks - np.cumsum(new_state) * (int(ticks.max()) + 1)
    least = np.minimum.accumulate(shifted)
    keep = new_state
    keep[1:] |= shifted[1:] < least[:-1]
    return order[keep]


def _sum(fronts: Sequence[Front], bound: "_Bound | None", deadline: float) -> Total:
    if sum(int(front.saved_bytes[-1]) for front in fronts) >= _MAX_BYTES:
        raise TooManyLabelsError
    saved, ticks = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    history: list[tuple[Ints, Ints]] = []
    for which, front in enumerate(fronts):
        num_points = len(front.saved_bytes)
        if len(saved) * num_points > 8 * _SUM_LABELS:
            raise TooManyLabelsError
        # By point of the part, the last first: one rising run for each, which a stable sort merges instead of sorting. Of equal labels
        # the one comes first whose part recomputes least.
        all_saved = np.add.outer(front.saved_bytes[::-1], saved).ravel()
        all_ticks = np.add.outer(front.ticks[::-1], ticks).ravel()
        keep = np.arange(len(all_saved))
        if bound is not None:
            keep = keep[bound.may_win(which, all_saved, all_ticks)]
        keep = keep[_useful(all_saved[keep], all_ticks[keep])]
        history.append((keep % len(saved), num_points - 1 - keep // len(saved)))
        saved, ticks = all_saved[keep], all_ticks[keep]
        if len(saved) > _SUM_LABELS:
            raise TooManyLabelsError
        if monotonic() > deadline:
            raise OutOfTimeError
    if bound is not None and not fronts and bound.limit < 0:
        saved, ticks = saved[:0], ticks[:0]
    return Total(saved_bytes=saved, ticks=ticks, history=tuple(history))


def _useful(saved: Ints, ticks: Ints) -> Ints:
    """Indices of the labels that none beats, by rising bytes; of labels that are equal in both one stays."""
    if not len(saved):
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(saved, kind="stable")
    least = np.minimum.accumulate(ticks[order])
    falling = order[np.concatenate(([True], least[1:] < least[:-1]))]
    is_last_of_its_bytes = np.concatenate((np.diff(saved[falling]) > 0, [True]))
    return falling[is_last_of_its_bytes]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hulls:
    """Lower convex hulls of sums of parts: what the parts from each one on can do at best.

    Attributes:
        whole: The hull of the Pareto set of the whole: rising saved bytes, falling ticks.
        rest: For each part, the hull of the sum of the parts after it.
    """

    whole: tuple[Ints, Ints]
    rest: tuple[tuple[Ints, Ints], ...]

    @staticmethod
    def of(fronts: Sequence[Front]) -> "Hulls":
        """The hulls of these parts."""
        hulls = [_lower_hull(front) for front in fronts]
        whole, *rest = _walked(hulls, descend(hulls))
        return Hulls(whole=whole, rest=tuple(rest))


class _Bound:
    """What the parts still to come can do at best, against a plan that is known."""

    def __init__(self, hulls: Hulls, limit: int, share: float) -> None:
        self.limit = limit
        self._rest = hulls.rest
        saved, ticks = hulls.whole
        within = int(np.searchsorted(saved, limit, side="right"))
        known, at_best = (
            (float(ticks[within - 1]), float(np.interp(limit, saved, ticks)))
            if within
            else (-1.0, -1.0)
        )
        self._most_ticks = at_best + share * (known - at_best)

    def may_win(self, which: int, saved: Ints, ticks: Ints) -> NDArray[np.bool_]:
        """Which labels, part `which` included, may still end as the best plan."""
        rest_saved, rest_ticks = self._rest[which]
        room = self.limit - saved
        # Half a tick is far above the rounding of the interpolation, and below what tells two plans apart.
        at_best = ticks + np.interp(room, rest_saved, rest_ticks)
        return (room >= rest_saved[0]) & (at_best <= self._most_ticks + 0.5)


def _walked(
    hulls: list[list[tuple[int, int]]], walk: list[tuple[int, int]]
) -> list[tuple[Ints, Ints]]:
    """For each part, and none, the hull of the sum of the parts from it on, by rising bytes."""
    which = np.array([part for part, _ in walk], dtype=np.int64)
    steps = np.array(
        [np.subtract(hulls[part][to], hulls[part][to - 1]) for part, to in walk], dtype=np.int64
    ).reshape(-1, 2)
    starts = np.array([points[0] for points in hulls], dtype=np.int64).reshape(-1, 2)
    walked = []
    for first in range(len(hulls) + 1):
        steps, which = steps[which >= first], which[which >= first]
        points = np.cumsum(np.vstack([starts[first:].sum(axis=0), steps]), axis=0)[::-1]
        walked.append((points[:, 0], points[:, 1]))
    return walked


def _lower_hull(front: Front) -> list[tuple[int, int]]:
    """The vertices of a front's lower convex hull, from the least time to the least bytes."""
    points = list(zip(front.saved_bytes.tolist(), front.ticks.tolist(), strict=True))[::-1]
    return [points[i] for i in hull_positions(points)]


def hull_positions(points: Sequence[tuple[float, float]]) -> list[int]:
    """Positions of the vertices of the lower convex hull (monotone chain).

    Args:
        points: (saved bytes, time) of strictly falling bytes and strictly rising time.

    Returns:
        Rising positions, both ends included.
    """
    stack: list[int] = []
    for position, (saved, time) in enumerate(points):
        while len(stack) >= 2:
            (saved_a, time_a), (saved_b, time_b) = (points[i] for i in stack[-2:])
            if (time_b - time_a) * (saved_b - saved) < (time - time_b) * (saved_a - saved_b):
                break
            stack.pop()
        stack.append(position)
    return stack
