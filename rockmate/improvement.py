"""Changes one schedule run by run, against the bytes that are really in use, to win back what solving by blocks or by totals loses.

* `spend_room` drops recomputations where there is room for the value to stay;
* `make_room` evicts values over the moments that exceed the budget and recomputes them before their next read.

Both are greedy: the best time for the bytes first. The caller simulates what comes back, so an estimate that was off costs nothing
but the attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from rockmate.accesses import Ints
from rockmate.costs import Costs
from rockmate.graph import Graph, Op, Storage
from rockmate.live_ranges import Extra, LiveRange, LiveRanges, can_run_again
from rockmate.schedule import Schedule
from rockmate.simulate import Simulation

_MAX_ROUNDS = 500
_ROUND = 0.5  # of the excess, after which prices are taken anew: an evicted value may have been an input
_MAX_RUNS = 60  # made again together for one evicted value


def spend_room(graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation, budget_bytes: int) -> Schedule:
    """The schedule without those recomputations whose values fit in the budget all the while."""
    ranges = LiveRanges(graph, costs, schedule, simulation)
    for position, least_extra in _drops_by_price(ranges, budget_bytes):
        if ranges.is_dropped(position) or (len(least_extra) == 1 and not _fits(ranges, least_extra, budget_bytes)):
            continue
        extra = ranges.extra_for_drop(position)
        if _fits(ranges, extra, budget_bytes):
            ranges.drop(position, extra)
    return ranges.schedule()


def _drops_by_price(ranges: LiveRanges, budget_bytes: int) -> list[tuple[int, list[Extra]]]:
    """Runs that could be dropped on their own, by the bytes and positions for which values stay longer over the time.

    Each is a position and what dropping it adds at least, after whatever else is dropped: (first, last, bytes).
    """
    position, first, last, num_bytes = ranges.stays_for_drops()
    if not len(position):
        return []
    is_too_much = _largest_between(ranges.bytes_in_use, first, last) + num_bytes > budget_bytes
    runs, run = np.unique(position, return_inverse=True)
    areas = np.bincount(run, weights=num_bytes * np.maximum(last - first + 1, 0))
    fits = np.bincount(run, weights=is_too_much) == 0
    times_ms = np.array([max(ranges.cost_ms(ranges.op_at(at)), 1e-9) for at in runs.tolist()])
    in_order = np.argsort(areas / times_ms, kind="stable")
    extra = list(zip(first.tolist(), last.tolist(), num_bytes.tolist(), strict=True))
    begin = np.searchsorted(run, np.arange(len(runs) + 1)).tolist()
    return [(int(runs[at]), extra[begin[at] : begin[at + 1]]) for at in in_order[fits[in_order]].tolist()]


def _largest_between(values: Ints, first: Ints, last: Ints) -> Ints:
    """The largest of `values[first]` to `values[last]`, for each pair; 0 where there is nothing between."""
    lengths = last - first + 1
    largest = np.zeros(len(first), dtype=np.int64)
    table = values  # the largest of so many values from each place on, which doubles
    width = 1
    while True:
        now = np.flatnonzero((lengths >= width) & (lengths < 2 * width))
        largest[now] = np.maximum(table[first[now]], table[last[now] - width + 1])
        if 2 * width > len(values):
            return largest
        table = np.maximum(table[:-width], table[width:])
        width *= 2


def _fits(ranges: LiveRanges, extra: Sequence[Extra], budget_bytes: int) -> bool:
    in_use = ranges.bytes_in_use
    if len(extra) == 1:
        first, last, num_bytes = extra[0]
        return first > last or int(in_use[first : last + 1].max()) + num_bytes <= budget_bytes
    more = np.zeros_like(in_use)
    for first, last, num_bytes in extra:
        more[first : last + 1] += num_bytes
    return not extra or int((in_use + more)[more > 0].max(initial=0)) <= budget_bytes


def make_room(graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation, budget_bytes: int) -> Schedule | None:
    """The schedule with values evicted wherever it exceeds the budget; None if nothing is left to evict.

    At the largest excess, values go in order of the time that they cost for each byte of the excess and each run that exceeds.
    """
    ranges = LiveRanges(graph, costs, schedule, simulation)
    for _ in range(_MAX_ROUNDS):
        worst = int(ranges.bytes_in_use.argmax())
        if ranges.bytes_in_use[worst] <= budget_bytes:
            return ranges.schedule()
        if not _evict_around(ranges, worst, budget_bytes):
            return None
    return None


def _evict_around(ranges: LiveRanges, worst: int, budget_bytes: int) -> bool:
    """Evicts values over position `worst` until the bytes in use there are within the budget; False if none can go."""
    evicted = False
    enough = budget_bytes + int((int(ranges.bytes_in_use[worst]) - budget_bytes) * (1 - _ROUND))
    for live in _by_price(ranges, worst, budget_bytes):
        gap = ranges.gap_around(live, worst)  # anew, with the runs: an eviction since may read it, or have been an input
        runs = _runs_to_make(ranges, live.storage, gap[1]) if gap else None
        if gap and runs and _fits_before(ranges, live.storage, runs, gap[1], budget_bytes):
            ranges.evict(live, gap, runs)
            evicted = True
            if ranges.bytes_in_use[worst] <= enough:
                break
    return evicted


def _by_price(ranges: LiveRanges, worst: int, budget_bytes: int) -> Iterator[LiveRange]:
    """What can be evicted at `worst`, by the time that it costs for each useful byte.

    Few of many are asked for, so each stands at the price of its own op alone until it comes first.
    """
    excess = int(ranges.bytes_in_use[worst]) - budget_bytes
    exceeding = np.concatenate([[0], np.cumsum(ranges.bytes_in_use > budget_bytes)])
    waiting: list[tuple[float, int, bool]] = []  # price, place in `over`, whether the price counts every run
    over = ranges.over(worst)
    useful: list[int] = []
    for place, live in enumerate(over):
        gap, producer = ranges.gap_around(live, worst), live.storage.producer
        useful.append(min(live.storage.num_bytes, excess) * int(exceeding[gap[1]] - exceeding[gap[0] + 1]) if gap else 0)
        if gap and can_run_again(producer):
            waiting.append((ranges.cost_ms(producer) / useful[place], place, False))
    heapify(waiting)
    while waiting:
        _, place, is_whole = heappop(waiting)
        live = over[place]
        if is_whole:
            yield live
            continue
        gap = ranges.gap_around(live, worst)
        runs = _runs_to_make(ranges, live.storage, gap[1]) if gap else None
        if runs is not None:
            heappush(waiting, (sum(ranges.cost_ms(op) for op in runs) / useful[place], place, True))


def _runs_to_make(ranges: LiveRanges, storage: Storage, position: int) -> list[Op] | None:
    """What has to run before `position` to have `storage` there, None if that is impossible or too much."""
    runs: dict[Op, None] = {}
    pending = [storage]
    while pending:
        producer = pending.pop().producer
        if producer in runs:
            continue
        if not can_run_again(producer) or len(runs) >= _MAX_RUNS:
            return None
        runs[producer] = None
        pending += [s for s in ranges.not_live(producer, position) if s is not storage]
    return sorted(runs, key=lambda op: op.index)


def _fits_before(ranges: LiveRanges, storage: Storage, runs: list[Op], position: int, budget_bytes: int) -> bool:
    """Whether the runs fit right before `position`, one after the other, what only they read released on the way."""
    overhead_bytes = {op: ranges.costs.again[op.index].overhead_bytes for op in runs}
    room = budget_bytes - ranges.bytes_before(position) + storage.num_bytes
    if sum(op.written_bytes + overhead_bytes[op] for op in runs) <= room:
        return True
    last_reader = {read: op for op in runs for read in op.reads}
    live = 0
    for op in runs:
        live += op.written_bytes
        if live + overhead_bytes[op] > room:
            return False
        for made in {*op.reads, *op.writes}:
            if made is not storage and made.producer in runs and last_reader.get(made, op) is op:
                live -= made.num_bytes
    return True
