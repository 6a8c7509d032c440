"""Moves for a schedule: which values leave memory, and when their copies begin and have to end.

A schedule above a budget is brought within it by moves alone:

1. *Which.* Values with a gap between two reads, greedily: those that help most at the positions
   above the budget for their bytes, until none is.
2. *When they have gone.* A copy out begins when the value is made. The step waits for it only where
   memory is short: the values wait in the order in which they leave.
3. *When they come back.* The same, backwards in time: a copy back begins as late as its lane allows
   with some time to spare, or later where memory is short.

A value for which memory was never short stays. The simulator judges the outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from rockmate._util import Floats, Ints
from rockmate.costs.cost import Costs, Link
from rockmate.graph.ir import Graph
from rockmate.schedule.liveness import DefUse, op_def_use
from rockmate.schedule.move import Move, movable_storages
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.schedule import Schedule, with_moves
from rockmate.schedule.simulate import Simulation, simulate

# Smaller values are not worth a copy: they would take a whole block of the other tier.
_MIN_BYTES = 4096
# Share of a copy's time by which it begins earlier than its lane needs, where there is room.
_SLACK = 0.5


class Gap(NamedTuple):
    """A stretch of a schedule in which a value is live and no run reads it.

    Attributes:
        storage: index of the storage.
        num_bytes: its size.
        made: position of the run that makes it.
        last: position of the last read before the gap, or of the run that makes it.
        first: position of the first read behind it.
    """

    storage: int
    num_bytes: int
    made: int
    last: int
    first: int


@dataclass(frozen=True, slots=True)
class _Profile:
    """What moves of one schedule are chosen by.

    Attributes:
        live: bytes in memory at each run without moves.
        times_ms: time of each run.
        num_forward: number of runs of the forward.
        num_others: number of further forwards in flight, whose saved values count everywhere.
        gaps: all that may be used.
    """

    live: Ints
    times_ms: Floats
    num_forward: int
    num_others: int
    gaps: Sequence[Gap]


class MoveFinder:
    """Finds moves for schedules of one graph.

    Args:
        costs: with the rates of the link.
        request: where values move to.
    """

    def __init__(self, graph: Graph, costs: Costs, request: OffloadRequest) -> None:
        assert costs.link is not None
        self._graph, self._costs, self._link = graph, costs, costs.link
        limit = request.host_bytes
        self._host_bytes = None if limit is None else limit // graph.num_in_flight
        self._movable = movable_storages(graph, request.device_type)
        # A smaller value takes less time to copy than to begin with it.
        self._min_bytes = max(_MIN_BYTES, self._link.latency_ms * self._link.out_gb_per_s * 1e6)
        self._profile = cache(self._new_profile)

    def least_peak(self, schedule: Schedule, simulation: Simulation) -> int:
        """The smallest peak to which moves bring a schedule, as far as `within` finds them."""
        profile = self._profile(schedule, simulation)
        _, live = self._choose(profile, 0)
        return int(live.max())

    def within(
        self,
        schedule: Schedule,
        simulation: Simulation,
        budget_bytes: int,
        preferred: Collection[int] = (),
    ) -> tuple[Schedule, Simulation] | None:
        """The schedule with moves within a budget; None if moves do not bring it there.

        Args:
            schedule: without moves.
            simulation: of it.
            budget_bytes: the budget.
            preferred: indices of storages that move before others.
        """
        profile = self._profile(schedule, simulation)
        chosen, live = self._choose(profile, budget_bytes, preferred)
        if live.max() > budget_bytes:
            return None
        moves = place_moves(profile, chosen, live, budget_bytes, self._link)
        moved = with_moves(self._graph, schedule, moves)
        found = simulate(self._graph, moved, self._costs)
        is_within = self._host_bytes is None or found.host_bytes <= (
            self._host_bytes * self._graph.num_in_flight
        )
        return (moved, found) if found.peak_bytes <= budget_bytes and is_within else None

    def _new_profile(self, schedule: Schedule, simulation: Simulation) -> _Profile:
        def_use = schedule.def_use or DefUse.of(op_def_use(self._graph), *schedule.order)
        first, recompute = self._costs.first_arrays, self._costs.recompute_arrays
        steps = def_use.steps
        return _Profile(
            live=np.array(simulation.live_bytes, dtype=np.int64),
            times_ms=np.where(def_use.is_first, first.time_ms[steps], recompute.time_ms[steps]),
            num_forward=len(schedule.forward),
            num_others=self._graph.num_in_flight - 1,
            gaps=self._gaps(def_use, len(schedule.forward)),
        )

    def _gaps(self, def_use: DefUse, num_forward: int) -> list[Gap]:
        storage, position, ops = def_use.storage, def_use.position, def_use.ops
        is_inside = (storage[1:] == storage[:-1]) & ~def_use.is_definition[1:]
        is_long = position[1:] - position[:-1] > 1
        is_large = ops.num_bytes[storage[1:]] >= self._min_bytes
        begins = position[:-1] < num_forward
        made = position[def_use.definitions()]
        return [
            Gap(
                int(storage[at]),
                int(ops.num_bytes[storage[at]]),
                int(made[at]),
                int(position[at]),
                int(position[at + 1]),
            )
            for at in np.flatnonzero(is_inside & is_long & is_large & begins).tolist()
            if int(storage[at]) in self._movable
        ]

    def _choose(
        self, profile: _Profile, budget_bytes: int, preferred: Collection[int] = ()
    ) -> tuple[list[Gap], Ints]:
        """Gaps to move in, and the bytes at each run with them; above the budget if none helps."""
        live, gaps = profile.live.copy(), profile.gaps
        if not gaps:
            return [], live
        sizes, made, last, first = (
            np.array([gap[field] for gap in gaps], dtype=np.int64) for field in (1, 2, 3, 4)
        )
        storages = np.array([gap.storage for gap in gaps], dtype=np.int64)
        is_free = np.ones(len(gaps), dtype=np.bool_)
        is_preferred = np.isin(storages, list(preferred))
        # Those that other forwards in flight save as well.
        is_saved = (last < profile.num_forward) & (first >= profile.num_forward)
        is_saved &= profile.num_others > 0
        chosen: list[Gap] = []
        left = self._host_bytes
        while (worst := int(live.argmax())) >= 0 and live[worst] > budget_bytes:
            excess = int(live[worst]) - budget_bytes
            above = np.concatenate([[0], np.cumsum(live > budget_bytes)])
            helps = is_free & (((last < worst) & (first > worst)) | is_saved)
            if left is not None:
                helps &= sizes <= left
            if not helps.any():
                break
            if (helps & is_preferred).any():
                helps &= is_preferred
            covered = above[first] - above[last + 1] + profile.num_others * above[-1] * is_saved
            score = np.where(helps, covered * np.minimum(sizes, excess) / sizes, -1.0)
            best = int(score.argmax())
            gap = gaps[best]
            chosen.append(gap)
            live[gap.last + 1 : gap.first] -= gap.num_bytes
            live -= profile.num_others * gap.num_bytes * int(is_saved[best])
            # One move for each value that a run makes.
            is_free &= (storages != gap.storage) | (made != gap.made)
            if left is not None:
                left -= gap.num_bytes
        return chosen, live


def place_moves(
    profile: _Profile, chosen: Sequence[Gap], live: Ints, budget_bytes: int, link: Link
) -> list[Move]:
    """When the copies of chosen values begin and have to have ended.

    Args:
        profile: the schedule.
        chosen: the gaps in which values are away.
        live: bytes at each run while they are away for the whole gap.
        budget_bytes: what they and those that are on their way have to fit.
        link: rates of the copies.
    """
    num_runs, num_forward = len(profile.times_ms), profile.num_forward
    live = live.copy()
    out = sorted(chosen, key=lambda gap: (gap.made, gap.last))
    sent = _lag(
        [
            _Job(gap.made + 1, gap.last + 1, _out_limit(profile, gap), link.out_ms(gap.num_bytes))
            for gap in out
        ],
        [gap.num_bytes for gap in out],
        profile.times_ms,
        live,
        budget_bytes,
    )
    # A value for which memory was never short stays.
    kept = [(gap, end) for gap, end in zip(out, sent, strict=True) if end < gap.first]
    back = sorted(kept, key=lambda entry: -entry[0].first)
    jobs = []
    for gap, end in back:
        lowest = max(end, num_forward if gap.first >= num_forward else 0)
        begin = num_runs - gap.first
        jobs.append(_Job(begin, begin, num_runs - lowest, link.in_ms(gap.num_bytes)))
    mirrored = live[::-1].copy()
    fetch = _lag(
        jobs,
        [gap.num_bytes for gap, _ in back],
        profile.times_ms[::-1],
        mirrored,
        budget_bytes,
        slack=_SLACK,
    )
    return [
        Move(
            storage=gap.storage,
            send=gap.made + 1,
            sent=end,
            fetch=num_runs - begin,
            fetched=gap.first,
        )
        for (gap, end), begin in zip(back, fetch, strict=True)
    ]


def _out_limit(profile: _Profile, gap: Gap) -> int:
    """The gap in which a value must have gone; one that is still there then stays."""
    is_saved = gap.last < profile.num_forward <= gap.first
    return profile.num_forward if profile.num_others and is_saved else gap.first


class _Job(NamedTuple):
    """One copy.

    Attributes:
        issue: gap in which it begins.
        begin: position from which on its memory is taken for the copy alone.
        limit: gap in which that must have ended.
        time_ms: its time.
    """

    issue: int
    begin: int
    limit: int
    time_ms: float


def _lag(
    jobs: Sequence[_Job],
    sizes: Sequence[int],
    times_ms: Floats,
    live: Ints,
    budget_bytes: int,
    *,
    slack: float | None = None,
) -> list[int]:
    """For each copy the gap in which its memory ends; `live` gets what it takes until then.

    Copies run one after the other. Where memory is short, time passes until enough have ended.

    Args:
        jobs: in the order in which they are issued.
        sizes: bytes of each.
        times_ms: time of each run.
        live: bytes at each run without the copies' own.
        budget_bytes: the most that may be live.
        slack: share of its time after which the memory of an ended copy is released although there
            is room; None keeps it as long as there is.
    """
    ends = [job.limit for job in jobs]
    lane_ms = now_ms = 0.0
    ended_ms = [0.0] * len(jobs)
    issued, waiting = 0, []
    last = max((job.limit for job in jobs), default=0)
    for position in range(min(last, len(times_ms))):
        while issued < len(jobs) and jobs[issued].issue <= position:
            lane_ms = max(now_ms, lane_ms) + jobs[issued].time_ms
            ended_ms[issued] = lane_ms
            waiting.append(issued)
            issued += 1
        over = [index for index in waiting if jobs[index].limit <= position]
        if slack is not None:
            over += [
                index
                for index in waiting
                if jobs[index].begin <= position < jobs[index].limit
                and ended_ms[index] + slack * jobs[index].time_ms <= now_ms
            ]
        for index in over:
            ends[index] = min(position, jobs[index].limit)
            waiting.remove(index)
        held = [index for index in waiting if jobs[index].begin <= position]
        held_bytes = sum(sizes[index] for index in held)
        while held and live[position] + held_bytes > budget_bytes:
            index = held.pop(0)
            now_ms = max(now_ms, ended_ms[index])
            ends[index] = position
            held_bytes -= sizes[index]
            waiting.remove(index)
        live[position] += held_bytes
        now_ms += times_ms[position]
    return ends
