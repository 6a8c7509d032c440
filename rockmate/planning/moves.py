"""Two moves of the local search: remove recomputations, and evict values.

* `remove_recomputations` saves values instead of recomputing them, where the budget has room.
* `spill_until_feasible` evicts values at the program points above the budget and recomputes each
  before its next read.

Both take the best ratio of time to bytes first (greedy) and work on `LiveRanges`, whose live bytes
are estimates. The caller simulates the result, so a wrong estimate costs one attempt. A third move,
the deferral of weight gradients, is in `deferral`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat

import numpy as np

from rockmate._util import Ints
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.planning.live_ranges import Extension, LiveRanges
from rockmate.planning.recomputation import Recomputation, recompute_tables
from rockmate.schedule.liveness import op_def_use
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import Simulation

# Limit on the rounds of eviction in one call.
_MAX_ROUNDS = 500
# Share of the excess that one round removes. Prices are then taken anew, because an evicted value
# may be an input of the next recomputation.
_EXCESS_SHARE = 0.5


def remove_recomputations(
    graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation, budget_bytes: int
) -> Schedule:
    """The schedule without those recomputations whose values can stay live within the budget."""
    ranges = LiveRanges(graph, costs, schedule, simulation)
    for position, min_extensions in _drops_by_price(ranges, budget_bytes):
        if ranges.is_dropped(position) or ranges.must_stay(position):
            continue
        if len(min_extensions) == 1 and not _fits(ranges, min_extensions, budget_bytes):
            continue
        extensions = ranges.extensions_for_drop(position)
        added_bytes = ranges.in_flight_bytes_for_drop(position)
        if added_bytes and int(ranges.live_bytes.max()) + added_bytes > budget_bytes:
            continue
        if _fits(ranges, extensions, budget_bytes - added_bytes):
            ranges.drop(position, extensions)
    return ranges.schedule()


def _drops_by_price(ranges: LiveRanges, budget_bytes: int) -> list[tuple[int, list[Extension]]]:
    """Recomputations whose removal alone fits, cheapest first: the added byte-positions over time.

    Returns:
        For each, its position and the least extensions of live intervals that its removal takes,
        whatever else is removed before.
    """
    position, first, last, num_bytes = ranges.drop_candidates()
    if not len(position):
        return []
    exceeds = _range_max(ranges.live_bytes, first, last) + num_bytes > budget_bytes
    runs, run = np.unique(position, return_inverse=True)
    byte_positions = num_bytes * np.maximum(last - first + 1, 0)
    if ranges.border_weight:
        # With several forwards in flight, a value live at the border counts everywhere.
        everywhere = ranges.border_weight * num_bytes * ranges.crosses_border(first - 1, last + 1)
        byte_positions += everywhere * len(ranges.live_bytes)
    areas = np.bincount(run, weights=byte_positions)
    fits = np.bincount(run, weights=exceeds) == 0
    times_ms = np.maximum(ranges.recompute_ms(runs), 1e-9)
    in_order = np.argsort(areas / times_ms, kind="stable")
    extensions = list(zip(first.tolist(), last.tolist(), num_bytes.tolist(), strict=True))
    begin = np.searchsorted(run, np.arange(len(runs) + 1)).tolist()
    return [
        (int(runs[at]), extensions[begin[at] : begin[at + 1]])
        for at in in_order[fits[in_order]].tolist()
    ]


def _range_max(values: Ints, first: Ints, last: Ints) -> Ints:
    """The maximum of `values[first]` to `values[last]` for each pair; 0 for an empty range.

    A sparse table: after k rounds, entry i holds the maximum of the 2**k values from i on.
    """
    lengths = last - first + 1
    largest = np.zeros(len(first), dtype=np.int64)
    table = values
    width = 1
    while True:
        now = np.flatnonzero((lengths >= width) & (lengths < 2 * width))
        largest[now] = np.maximum(table[first[now]], table[last[now] - width + 1])
        if 2 * width > len(values):
            return largest
        table = np.maximum(table[:-width], table[width:])
        width *= 2


def _fits(ranges: LiveRanges, extensions: Sequence[Extension], budget_bytes: int) -> bool:
    """Whether live bytes stay within the budget with these extensions of live intervals."""
    live_bytes = ranges.live_bytes
    if len(extensions) == 1:
        first, last, num_bytes = extensions[0]
        return first > last or int(live_bytes[first : last + 1].max()) + num_bytes <= budget_bytes
    together = live_bytes.copy()
    for first, last, num_bytes in extensions:
        together[first : last + 1] += num_bytes
    return all(
        first > last or int(together[first : last + 1].max()) <= budget_bytes
        for first, last, _ in extensions
    )


def spill_until_feasible(
    graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation, budget_bytes: int
) -> Schedule | None:
    """The schedule with values evicted where it exceeds the budget; None if no candidate remains.

    Each round evicts at the largest excess. The cheapest value goes first: recompute time for each
    byte of the excess and each program point above the budget.
    """
    ranges = LiveRanges(graph, costs, schedule, simulation)
    for _ in range(_MAX_ROUNDS):
        worst = int(ranges.live_bytes.argmax())
        if ranges.live_bytes[worst] <= budget_bytes:
            return ranges.schedule()
        if not _evict_around(ranges, worst, budget_bytes):
            return None
    return None


def _evict_around(ranges: LiveRanges, worst: int, budget_bytes: int) -> bool:
    """Evicts values at position `worst` until part of the excess is gone; False if none can go."""
    evicted = False
    excess = int(ranges.live_bytes[worst]) - budget_bytes
    enough = budget_bytes + int(excess * (1 - _EXCESS_SHARE))
    for storage in _by_price(ranges, worst, budget_bytes):
        # An eviction in this loop may have added a read of the value or taken an input away.
        gap = _gap(ranges, storage, worst)
        recomputation = ranges.recomputation(storage, gap[1]) if gap else None
        if gap and recomputation and _fits_before(ranges, recomputation, gap, budget_bytes):
            ranges.evict(recomputation, gap)
            evicted = True
            if ranges.live_bytes[worst] <= enough:
                break
    return evicted


def _by_price(ranges: LiveRanges, worst: int, budget_bytes: int) -> Iterator[int]:
    """The values that can be evicted at `worst`, by recompute time for each useful byte.

    The caller takes few of many. So each value first stands in a heap at the price of its own op,
    and its whole recomputation is priced when it comes to the top (lazy evaluation).
    """
    num_bytes = op_def_use(ranges.graph).num_bytes
    excess = int(ranges.live_bytes[worst]) - budget_bytes
    # Entry i counts the positions before i that exceed the budget.
    num_exceeding = np.concatenate([[0], np.cumsum(ranges.live_bytes > budget_bytes)])
    gaps = ranges.gaps_around(worst)
    useful = np.minimum(num_bytes[gaps.storage], excess) * (
        num_exceeding[gaps.following] - num_exceeding[gaps.last + 1]
    )
    if ranges.border_weight:
        lowered = ranges.border_weight * np.minimum(num_bytes[gaps.storage], excess)
        useful += lowered * num_exceeding[-1] * ranges.crosses_border(gaps.last, gaps.following)
    producers = recompute_tables(ranges.graph).producer[gaps.storage]
    prices = ranges.costs.recompute_arrays.time_ms[producers] / useful
    columns = (prices, gaps.order, gaps.storage, useful)
    # The last column tells whether the price includes the whole recomputation.
    heap = list(zip(*(column.tolist() for column in columns), repeat(False)))
    heapify(heap)
    while heap:
        _, order, storage, useful_bytes, is_whole = heappop(heap)
        if is_whole:
            yield storage
            continue
        gap = _gap(ranges, storage, worst)
        recomputation = ranges.recomputation(storage, gap[1]) if gap else None
        if recomputation is not None:
            price = recomputation.time_ms / useful_bytes
            heappush(heap, (price, order, storage, useful_bytes, True))


def _gap(ranges: LiveRanges, storage: int, worst: int) -> tuple[int, int] | None:
    """The gap of a value in which its eviction helps at position `worst`."""
    return ranges.gap_around(storage, worst) or ranges.gap_at_border(storage)


def _fits_before(
    ranges: LiveRanges, recomputation: Recomputation, gap: tuple[int, int], budget_bytes: int
) -> bool:
    """Whether the recomputed ops fit into the budget right before the end of a gap."""
    # The value itself is counted there already: it is live before its eviction.
    counted_bytes = ranges.graph.storages[recomputation.storage].num_bytes
    if ranges.crosses_border(*gap):
        counted_bytes *= 1 + ranges.border_weight
    free_bytes = budget_bytes - ranges.bytes_before(gap[1]) + counted_bytes
    return recomputation.peak_bytes <= free_bytes
