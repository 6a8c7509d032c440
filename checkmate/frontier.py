"""The exact Pareto set of (saved bytes, time), by dynamic programming over labels.

Within a part (`reduction.Part`) the ops are swept in reverse topological order. A *label* is a
choice for the ops swept so far: its bytes, its ticks, and its *state*, the set of links that a
recomputed op reads and whose maker is still to come. At each op a label either keeps the op's
required and needed outputs (bytes) or recomputes it (ticks, and its own links become needed). Of
two labels in one state the dominated one is dropped (the list method of Nemhauser and Ullmann,
1969, along a path decomposition), so time grows with the number of open links, small in practice,
and with the number of Pareto points.

The parts' sets are then summed one part at a time. For one limit, a label is also dropped if the
convex hull of the remaining parts cannot bring it below the best known plan. Few labels remain.
Fewer still remain when a plan is first sought that is nearer to the hull than the known one. If
there is one, it is the best.

The answer is always optimal. Rather than run for long, the program refuses (`TooManyLabelsError`).
The refusal depends on the input alone, never on the clock, so equal input takes equal paths. This
is where NP-hardness shows, and where the convex hull (`hull`) takes over.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from checkmate.hull import merge_steps
from checkmate.reduction import Part, PartOp, Reduced

# Limit on the labels of one part.
_MAX_PART_LABELS = 1 << 16
# Limit on the labels of one part, summed over its ops: the work of its sweep, of about a third of a
# second. Parts of a HRNet, ResNet, U-Net or mixture of experts take less than a twentieth of it. Of
# a Qwen3-Next with two layers, three parts of 500 to 1,000 ops take up to 18 million in 1 to 1.6 s
# each, and give Pareto sets of 14,500 points, or none.
_MAX_SWEEP_WORK = 1 << 22
# Limit on the labels of the sum of parts.
_MAX_SUM_LABELS = 1 << 18
# Limit on the points of a merged part. A higher limit gives fewer parts of more points.
_MAX_MERGED_POINTS = 64
# Shares of the gap between the hull and a known plan that are searched in turn. The best plan is
# seldom far from the hull.
_GAP_SHARES = (0.05, 0.3, 1.0)
# Limit on links that are open at once: each takes one bit of a state.
_MAX_OPEN_LINKS = 62
# Limit on sums of bytes, which are 64-bit integers.
_MAX_BYTES = 1 << 61

# The last parts that were too wide, and for which limit. The program points of a model share their
# widest part, and it takes seconds to find that out.
_TOO_WIDE: deque[tuple[tuple[PartOp, ...], int]] = deque(maxlen=64)

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
        recomputed: For each point, whether each op of the part is recomputed; shape (points, ops).
    """

    saved_bytes: Ints
    ticks: Ints
    recomputed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Total:
    """Labels of the sum over all parts, with the history that tells the choice behind each.

    Attributes:
        saved_bytes: Strictly rising.
        ticks: Strictly falling.
        history: For each part, each label's predecessor and the point of the part that it chose.
    """

    saved_bytes: Ints
    ticks: Ints
    history: tuple[tuple[Ints, Ints], ...]


def part_fronts(reduced: Reduced, *, deadline: float) -> tuple[Front, ...]:
    """The Pareto set of every part; equal parts are solved once.

    Args:
        reduced: The parts.
        deadline: Time to give up at, in seconds of `time.monotonic`.

    Raises:
        TooManyLabelsError: A part is too wide for the sweep.
        OutOfTimeError: The deadline passed.
    """
    known: dict[tuple[PartOp, ...], Front] = {}
    for part in reduced.parts:
        if part.ops not in known:
            known[part.ops] = _sweep_once(part, deadline)
    return tuple(known[part.ops] for part in reduced.parts)


def merge_fronts(reduced: Reduced, fronts: Sequence[Front]) -> tuple[Reduced, tuple[Front, ...]]:
    """The same problem in fewer parts with short Pareto sets, so that each sum takes less time.

    Args:
        reduced: The parts.
        fronts: Their Pareto sets.

    Returns:
        Parts, each merged from one or several of those given, and their Pareto sets. Equal parts
        are merged first. Nothing is lost.
    """
    kinds: dict[tuple[PartOp, ...], list[int]] = {}
    for number, part in enumerate(reduced.parts):
        kinds.setdefault(part.ops, []).append(number)
    parts: list[Part] = []
    together: list[Front] = []
    for number in (number for equal in kinds.values() for number in equal):
        part, front = reduced.parts[number], fronts[number]
        both = _minkowski_sum(together[-1], front) if together else None
        if both is None or len(both.saved_bytes) > _MAX_MERGED_POINTS:
            parts.append(part)
            together.append(front)
        else:
            parts[-1] = Part(ops=parts[-1].ops + part.ops, indices=parts[-1].indices + part.indices)
            together[-1] = both
    return Reduced(free=reduced.free, parts=tuple(parts)), tuple(together)


def _minkowski_sum(one: Front, other: Front) -> Front | None:
    """The Pareto set of two parts together; None if they have too many pairs of points."""
    num_others = len(other.saved_bytes)
    if len(one.saved_bytes) * num_others > _MAX_MERGED_POINTS**2:
        return None
    saved_bytes = np.add.outer(one.saved_bytes, other.saved_bytes).ravel()
    ticks = np.add.outer(one.ticks, other.ticks).ravel()
    keep = _nondominated(saved_bytes, ticks)
    return Front(
        saved_bytes=saved_bytes[keep],
        ticks=ticks[keep],
        recomputed=np.hstack(
            [one.recomputed[keep // num_others], other.recomputed[keep % num_others]]
        ),
    )


def sum_fronts(fronts: Sequence[Front], *, deadline: float) -> Total:
    """The Pareto set of the whole problem: every useful level.

    Raises:
        TooManyLabelsError: There are too many levels to list.
        OutOfTimeError: The deadline passed.
    """
    return _sum(fronts, None, deadline)


def best_within(
    fronts: Sequence[Front], max_saved_bytes: int, *, deadline: float, hulls: "Hulls | None" = None
) -> Total:
    """Labels within a limit, the last of which is the fastest; empty if there is no plan.

    Args:
        fronts: The parts' Pareto sets.
        max_saved_bytes: The limit.
        deadline: Time to give up at, in seconds of `time.monotonic`.
        hulls: Of these fronts, to be given if many limits are asked for.

    Raises:
        TooManyLabelsError: The bound leaves too many labels.
        OutOfTimeError: The deadline passed.
    """
    hulls, limit = hulls or Hulls.of(fronts), min(max_saved_bytes, _MAX_BYTES)
    for share in _GAP_SHARES:
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


def _sweep_once(part: Part, deadline: float) -> Front:
    """The sweep of a part, unless the same one was too wide a while ago."""
    if (part.ops, _MAX_PART_LABELS) in _TOO_WIDE:
        raise TooManyLabelsError
    try:
        return _sweep(part, deadline)
    except TooManyLabelsError:
        _TOO_WIDE.append((part.ops, _MAX_PART_LABELS))
        raise


def _sweep(part: Part, deadline: float) -> Front:
    if sum(op.kept_bytes + sum(op.link_bytes) for op in part.ops) >= _MAX_BYTES:
        raise TooManyLabelsError
    state, saved, ticks = (np.zeros(1, dtype=np.int64) for _ in range(3))
    history: list[tuple[Ints, NDArray[np.bool_]]] = []
    bit_of: dict[int, int] = {}
    idle_bits = [1 << i for i in reversed(range(_MAX_OPEN_LINKS))]
    work = 0
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
        work += len(labels)
        keep = _nondominated_by_state(rest, saved, ticks)
        state, saved, ticks = rest[keep], saved[keep], ticks[keep]
        history.append((labels[keep], redone[keep]))
        if len(state) > _MAX_PART_LABELS or work > _MAX_SWEEP_WORK:
            raise TooManyLabelsError
        if monotonic() > deadline:
            raise OutOfTimeError
    recomputed = np.zeros((len(state), len(part.ops)), dtype=np.bool_)
    label = np.arange(len(state))
    for position, (parent, redone) in enumerate(reversed(history)):
        recomputed[:, position] = redone[label]
        label = parent[label]
    return Front(saved_bytes=saved, ticks=ticks, recomputed=recomputed)


def _nondominated_by_state(state: Ints, saved: Ints, ticks: Ints) -> Ints:
    """Indices of the nondominated labels of each state, by state, then by rising bytes."""
    order = np.lexsort((ticks, saved, state))
    state, ticks = state[order], ticks[order]
    new_state = np.empty(len(order), dtype=np.bool_)
    new_state[0] = True
    np.not_equal(state[1:], state[:-1], out=new_state[1:])
    # Later states get lower numbers, so a running minimum starts anew with each state.
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
        if len(saved) * num_points > 8 * _MAX_SUM_LABELS:
            raise TooManyLabelsError
        # By point of the part, the last first: each point gives one rising run, and a stable sort
        # merges runs. Of equal labels, the one whose part recomputes least comes first.
        all_saved = np.add.outer(front.saved_bytes[::-1], saved).ravel()
        all_ticks = np.add.outer(front.ticks[::-1], ticks).ravel()
        keep = np.arange(len(all_saved))
        if bound is not None:
            keep = keep[bound.can_win(which, all_saved, all_ticks)]
        keep = keep[_nondominated(all_saved[keep], all_ticks[keep])]
        history.append((keep % len(saved), num_points - 1 - keep // len(saved)))
        saved, ticks = all_saved[keep], all_ticks[keep]
        if len(saved) > _MAX_SUM_LABELS:
            raise TooManyLabelsError
        if monotonic() > deadline:
            raise OutOfTimeError
    if bound is not None and not fronts and bound.limit < 0:
        saved, ticks = saved[:0], ticks[:0]
    return Total(saved_bytes=saved, ticks=ticks, history=tuple(history))


def _nondominated(saved: Ints, ticks: Ints) -> Ints:
    """Indices of the nondominated labels, by rising bytes; one of each group of equal labels."""
    if not len(saved):
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(saved, kind="stable")
    least = np.minimum.accumulate(ticks[order])
    falling = order[np.concatenate(([True], least[1:] < least[:-1]))]
    is_last_of_its_bytes = np.concatenate((np.diff(saved[falling]) > 0, [True]))
    return falling[is_last_of_its_bytes]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hulls:
    """Lower convex hulls of the sums of all parts from each part on.

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
        whole, *rest = _suffix_hulls(hulls, merge_steps(hulls))
        return Hulls(whole=whole, rest=tuple(rest))


class _Bound:
    """Bounds a label by the hull of the remaining parts and compares it with a known plan."""

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
        self._max_ticks = at_best + share * (known - at_best)

    def can_win(self, which: int, saved: Ints, ticks: Ints) -> NDArray[np.bool_]:
        """Whether each label, with part `which` chosen, can still become the best plan."""
        rest_saved, rest_ticks = self._rest[which]
        room = self.limit - saved
        # Half a tick is far above the rounding of the interpolation, and below what tells two plans
        # apart.
        at_best = ticks + np.interp(room, rest_saved, rest_ticks)
        return (room >= rest_saved[0]) & (at_best <= self._max_ticks + 0.5)


def _suffix_hulls(
    hulls: list[list[tuple[int, int]]], walk: list[tuple[int, int]]
) -> list[tuple[Ints, Ints]]:
    """For each part, and for none, the hull of the sum from it on, by rising bytes."""
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
