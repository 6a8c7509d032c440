"""Changes one schedule run by run, against the bytes that are really in use, to win back what solving by blocks or by totals loses.

* `remove_recomputations` drops recomputations where there is room for the value to stay;
* `spill_until_feasible` evicts values over the moments that exceed the budget and recomputes them before their next read.

Both are greedy: the best time for the bytes first. The caller simulates what comes back, so an estimate that was off costs nothing
but the attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import repeat

import numpy as np

from rockmate._arrays import Ints
from rockmate.capture.roles import RoleKind
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Op, Phase
from rockmate.planning.live_ranges import Insertion, LiveRanges, Recomputation
from rockmate.schedule.liveness import op_def_use
from rockmate.schedule.schedule import Schedule, finish
from rockmate.schedule.simulate import Simulation

_MAX_ROUNDS = 500
_ROUND = (
    0.5  # of the excess, after which prices are taken anew: an evicted value may have been an input
)


def remove_recomputations(
    graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation, budget_bytes: int
) -> Schedule:
    """The schedule without those recomputations whose values fit in the budget all the while."""
    ranges = LiveRanges(graph, costs, schedule, simulation)
    for position, least_extra in _drops_by_price(ranges, budget_bytes):
        if ranges.is_dropped(position) or (
            len(least_extra) == 1 and not _fits(ranges, least_extra, budget_bytes)
        ):
            continue
        extra = ranges.extra_for_drop(position)
        if _fits(ranges, extra, budget_bytes):
            ranges.drop(position, extra)
    return ranges.schedule()


def _drops_by_price(ranges: LiveRanges, budget_bytes: int) -> list[tuple[int, list[Insertion]]]:
    """Runs that could be dropped on their own, by the bytes and positions for which values stay longer over the time.

    Each is a position and what dropping it adds at least, after whatever else is dropped: (first, last, bytes).
    """
    position, first, last, num_bytes = ranges.drop_candidates()
    if not len(position):
        return []
    is_too_much = _largest_between(ranges.bytes_in_use, first, last) + num_bytes > budget_bytes
    runs, run = np.unique(position, return_inverse=True)
    areas = np.bincount(run, weights=num_bytes * np.maximum(last - first + 1, 0))
    fits = np.bincount(run, weights=is_too_much) == 0
    times_ms = np.maximum(ranges.again_ms(runs), 1e-9)
    in_order = np.argsort(areas / times_ms, kind="stable")
    extra = list(zip(first.tolist(), last.tolist(), num_bytes.tolist(), strict=True))
    begin = np.searchsorted(run, np.arange(len(runs) + 1)).tolist()
    return [
        (int(runs[at]), extra[begin[at] : begin[at + 1]])
        for at in in_order[fits[in_order]].tolist()
    ]


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


def _fits(ranges: LiveRanges, extra: Sequence[Insertion], budget_bytes: int) -> bool:
    in_use = ranges.bytes_in_use
    if len(extra) == 1:
        first, last, num_bytes = extra[0]
        return first > last or int(in_use[first : last + 1].max()) + num_bytes <= budget_bytes
    together = in_use.copy()
    for first, last, num_bytes in extra:
        together[first : last + 1] += num_bytes
    return all(
        first > last or int(together[first : last + 1].max()) <= budget_bytes
        for first, last, _ in extra
    )


def spill_until_feasible(
    graph: Graph, costs: Costs, schedule: Schedule, simulation: Simulation, budget_bytes: int
) -> Schedule | None:
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
    for storage in _by_price(ranges, worst, budget_bytes):
        gap = ranges.gap_around(
            storage, worst
        )  # anew, with the runs: an eviction since may read it, or have been an input
        remake = ranges.remake(storage, gap[1]) if gap else None
        if gap and remake and _fits_before(ranges, remake, gap[1], budget_bytes):
            ranges.evict(remake, gap)
            evicted = True
            if ranges.bytes_in_use[worst] <= enough:
                break
    return evicted


def _by_price(ranges: LiveRanges, worst: int, budget_bytes: int) -> Iterator[int]:
    """Storages that can be evicted at `worst`, by the time that it costs for each useful byte.

    Few of many are asked for, so each stands at the price of its own op alone until it comes first.
    """
    ops = op_def_use(ranges.graph)
    excess = int(ranges.bytes_in_use[worst]) - budget_bytes
    num_exceeding = np.concatenate(
        [[0], np.cumsum(ranges.bytes_in_use > budget_bytes)]
    )  # before each position
    gaps = ranges.gaps_around(worst)
    useful = np.minimum(ops.num_bytes[gaps.storage], excess) * (
        num_exceeding[gaps.following] - num_exceeding[gaps.last + 1]
    )
    prices = ranges.costs.recompute_arrays.time_ms[ops.producer[gaps.storage]] / useful
    columns = (prices, gaps.order, gaps.storage, useful)
    waiting = list(
        zip(*(column.tolist() for column in columns), repeat(False))
    )  # the last: whether the price counts every run
    heapify(waiting)
    while waiting:
        _, order, storage, useful_bytes, is_whole = heappop(waiting)
        if is_whole:
            yield storage
            continue
        gap = ranges.gap_around(storage, worst)
        remake = ranges.remake(storage, gap[1]) if gap else None
        if remake is not None:
            heappush(waiting, (remake.time_ms / useful_bytes, order, storage, useful_bytes, True))


def _fits_before(
    ranges: LiveRanges, remake: Recomputation, position: int, budget_bytes: int
) -> bool:
    """Whether the runs fit right before `position`."""
    result_and_workspace_bytes = ranges.graph.storages[
        remake.storage
    ].num_bytes  # in use there in any case
    return (
        remake.peak_bytes
        <= budget_bytes - ranges.bytes_before(position) + result_and_workspace_bytes
    )


def deferrable_ops(graph: Graph) -> frozenset[Op]:
    """Backward ops whose results nothing reads, and which make all of each gradient that they hand over.

    One of several contributions to a gradient stays where it is: in another order their sum is rounded differently. So does what reads a
    parameter that another op makes the gradient of: the hooks of that parameter wait for its last read, and what they must see whole with
    them.
    """
    parameters = {
        role.name: graph.storage_of[node]
        for node, role in graph.inputs
        if role.kind is RoleKind.PARAMETER
    }
    contributions = Counter(parameters[role.name] for _, role in graph.initial_gradients)
    contributions.update(
        parameters[role.name] for op in graph.ops for _, role in op.final_gradients
    )
    return frozenset(
        op
        for op in graph.ops
        if op.phase is Phase.BACKWARD
        and not op.is_random
        and not any(graph.readers.get(storage) for storage in op.writes)
        and all(contributions[parameters[role.name]] == 1 for _, role in op.final_gradients)
        and (contributions.keys() & op.reads)
        <= {parameters[role.name] for _, role in op.final_gradients}
    )


def result_and_workspace_bytes(graph: Graph, costs: Costs) -> Ints:
    """What the first run of each op takes beside what it reads."""
    return op_def_use(graph).written_bytes + costs.first_arrays.overhead_bytes


def insertion_points(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    simulation: Simulation,
    position: int,
    budget_bytes: int,
) -> list[int]:
    """Positions right before which the run at `position` could stand within the budget: the one of most room, and the last.

    None where the runs beside it need as much, so that nothing is gained. An estimate: what the run reads is taken to stay until then,
    made anew or not, and bytes at the end of the step to be those at its last run.
    """
    live_bytes = np.array(simulation.live_bytes, dtype=np.int64)
    in_use = (live_bytes + _staying_bytes(graph, schedule, position))[position + 1 :]
    if not len(in_use) or max(live_bytes[position - 1], in_use[0]) >= live_bytes[position]:
        return []
    own = result_and_workspace_bytes(graph, costs)
    steps = np.array(schedule.steps, dtype=np.int64)
    before = in_use - own[steps[position + 1 :]]
    for place in schedule.in_place:
        if place > position:
            before[place - position - 1] += graph.ops[schedule.steps[place]].writes[0].num_bytes
    before_next = np.append(before[1:], before[-1])
    has_room = np.logical_and.accumulate(in_use <= budget_bytes) & (
        before_next + own[steps[position]] <= budget_bytes
    )
    behind = np.flatnonzero(has_room)  # of these runs
    if not len(behind):
        return []
    roomiest = int(behind[before_next[behind].argmin()])
    return [position + 2 + place for place in dict.fromkeys((roomiest, int(behind[-1])))]


def _staying_bytes(graph: Graph, schedule: Schedule, position: int) -> Ints:
    """Bytes at each run of what the run at `position` reads and would otherwise have been released by then."""
    def_use, ops = schedule.def_use, op_def_use(graph)
    assert def_use is not None
    reads = np.flatnonzero(
        (def_use.position == position) & ~def_use.is_definition & ~ops.is_held[def_use.storage]
    )
    lasts = np.flatnonzero(def_use.is_last)
    ends = def_use.position[lasts[np.searchsorted(lasts, reads)]]
    staying = np.zeros(len(schedule.steps), dtype=np.int64)
    for end, storage in zip(ends.tolist(), def_use.storage[reads].tolist(), strict=True):
        is_taken_over = end in schedule.in_place and end > position
        staying[end if is_taken_over else end + 1 :] += ops.num_bytes[storage]
    return staying


def defer(graph: Graph, schedule: Schedule, position: int, place: int) -> Schedule:
    """The schedule with the run at `position`, of the backward, right before `place`, which is behind it."""
    steps, num_forward = schedule.steps, len(schedule.forward)
    return finish(
        graph,
        schedule.forward,
        [
            *steps[num_forward:position],
            *steps[position + 1 : place],
            steps[position],
            *steps[place:],
        ],
    )
