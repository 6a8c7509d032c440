"""Weights that do not fit: which stay in memory, and when the others are fetched.

A budget then bounds activations and these weights together. A plan is chosen in three steps:

1. *Activations.* Schedules for a grid of smaller budgets, as if all weights were in memory. What
   such a schedule leaves free, run by run, is room for weights.
2. *Residents.* Some weights stay: of candidates from none to all that fit. They are spread evenly
   in the order of their reads, so that the link has as much to do at any time; some of them are the
   ones that are read first, when nothing runs beside a copy.
3. *Fetches.* A weight is kept from one read to the next where there is room, the shortest gaps
   first. Every other read is preceded by a copy, which begins as early as memory allows, in the
   order of reads.

The replay in lanes has the time of each candidate, and the fastest is taken. One with all weights
in memory is the plan that there is without homes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from rockmate._util import Floats, Ints
from rockmate.graph.in_place import may_be_saved_opaquely
from rockmate.graph.ir import Phase
from rockmate.offload.weight_home import named_weights
from rockmate.planning.candidate import Candidate, around_best, by_time
from rockmate.planning.form import Form, Found, time_of
from rockmate.planning.strategies import DEFAULT, UNMOVED
from rockmate.schedule.move import Fetch
from rockmate.schedule.simulate import simulate

# Budgets of activations that are tried: shares of the baseline's peak, each the last one divided by
# this ratio.
_RATIO = 1.35
# Shares of the room for weights that residents take, the one with the fewest copies first, and the
# part of that for those read first.
_SHARES, _FIRST = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.25, 0.0), 0.1
# Bytes that are left to copies, in largest weights.
_RESERVES = (0.0, 1.0, 3.0)
# A weight that is so many times as large as the middle one is kept before others.
_OUTLIER = 3
_NUM_REFINEMENTS = 2


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight that can be at home: its storage, bytes and the time of a copy."""

    storage: int
    num_bytes: int
    copy_ms: float


class WeightSearch:
    """The search for plans whose weights come and go.

    Args:
        captured: the step as captured.
        with_trained: whether trained ones may, too.
        within: gives the fastest schedule with all weights in memory within a budget of
            activations, for a strategy.
        smallest: gives the schedule of the smallest peak with all weights in memory.
        minimum: gives that of the step as captured, which may be smaller beside fetched weights.
    """

    def __init__(
        self,
        captured: Form,
        with_trained: bool,
        within: Callable[[int, str], Found | None],
        smallest: Callable[[str], Found],
        minimum: Callable[[str], Candidate],
    ) -> None:
        self._captured, self._within, self._smallest = captured, cache(within), cache(smallest)
        self._minimum = cache(minimum)
        self._of = cache(lambda form: _weights_of(form, with_trained))
        self._with_trained = with_trained
        self._rule = captured.local_search.problem.rule
        self._most = 1 + self._rule.gap_tolerance

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights that can be at home."""
        return _sum(self._of(self._captured))

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """They themselves, by their paths."""
        form = self._captured
        inputs = {form.graph.storage_of[node].index: role.path for node, role in form.graph.inputs}
        named = named_weights(form.step.model, with_trained=self._with_trained)
        return {inputs[each.storage]: named[inputs[each.storage]] for each in self._of(form)}

    def best_within(self, budget_bytes: int, strategy: str) -> Found | None:
        """The fastest plan found within a budget; None if none fits."""
        num_bytes, room_bytes = self.num_bytes, budget_bytes - self.num_bytes
        if not num_bytes:
            return self._within(budget_bytes, strategy)
        best = self._within(room_bytes, strategy) if self._fits(room_bytes, strategy) else None
        if best is not None:
            best = Found(best.form, replace(best.candidate, resident_bytes=num_bytes))
        least_ms = max(self._captured.baseline.time_ms, self.copy_ms(budget_bytes))
        starts = self._starts(budget_bytes, strategy)
        while time_of(best) > self._most * least_ms and (found := next(starts, None)) is not None:
            last = best
            for start in found:
                if start.time_ms < time_of(best):
                    best = self._fetched(start, budget_bytes, best)
            if best is last is not None and self._rule.is_late:
                break
        if best is None:
            start = Found(self._captured, self._minimum(strategy))
            best = self._fetched(start, budget_bytes, None)
        return best

    def _fits(self, num_bytes: int, strategy: str) -> bool:
        """Whether activations fit so many bytes: searches that find nothing take long."""
        if num_bytes >= self._minimum(strategy).peak_bytes or num_bytes <= 0:
            return num_bytes > 0
        return num_bytes >= self._smallest(strategy).candidate.peak_bytes

    def least(self, form: Form, start: Candidate) -> Candidate:
        """A schedule with all weights at home, at its smallest peak."""
        placement = _Placement(form, start, self._of(form))
        found = placement.candidate(frozenset(), placement.least_bytes, 0.0)
        assert found is not None
        return found

    def copy_ms(self, budget_bytes: int) -> float:
        """The least time of copies: each half of the step fetches what it reads beyond a budget."""
        form = self._captured
        weights, link = self._of(form), form.costs.link
        assert link is not None
        late = {s.index for op in form.graph.ops if op.phase is Phase.BACKWARD for s in op.reads}
        halves = _sum(weights), _sum(each for each in weights if each.storage in late)
        missing = sum(max(0, num_bytes - budget_bytes) for num_bytes in halves)
        return missing / (link.in_gb_per_s * 1e6)

    def _starts(self, budget_bytes: int, strategy: str) -> Iterator[Iterable[Found]]:
        """Schedules with all weights in memory: for all but the largest, for smaller budgets."""

        def within(start_bytes: int) -> Iterator[Found]:
            ways = (UNMOVED, DEFAULT) if strategy == DEFAULT else (strategy,)
            return filter(None, (self._within(start_bytes, way) for way in ways))

        first_bytes = budget_bytes - max(each.num_bytes for each in self._of(self._captured))
        if self._fits(first_bytes, strategy):
            yield within(first_bytes)
        start_bytes = self._captured.baseline.peak_bytes
        while self._fits(start_bytes, strategy):
            if start_bytes <= budget_bytes:
                yield within(start_bytes)
            start_bytes = int(start_bytes / _RATIO)
        yield [self._smallest(strategy)]

    def _fetched(self, start: Found, budget_bytes: int, best: Found | None) -> Found | None:
        """The best of the plans that a start gives, and another."""
        form, candidate = start
        placement = _Placement(form, candidate, self._of(form))
        room_bytes = budget_bytes - placement.least_bytes
        times: dict[float, float] = {}
        shares: Sequence[float] = _SHARES if room_bytes >= 0 else ()
        for _ in range(_NUM_REFINEMENTS + 1):
            for share in shares:
                found = [
                    placement.candidate(residents, budget_bytes, reserve)
                    for residents in _residents(self._of(form), int(share * room_bytes))
                    for reserve in _RESERVES
                ]
                fastest = min(filter(None, found), key=by_time, default=None)
                times[share] = time_of(fastest)
                if fastest is not None and fastest.time_ms < time_of(best):
                    best = Found(form, fastest)
                if time_of(best) <= self._most * start.time_ms:
                    return best
            middles = ((one + other) / 2 for one, other in around_best(times)) if times else ()
            shares = tuple(middles)
        return best


class _Placement:
    """A schedule, and what it takes to fetch weights in it.

    Attributes:
        least_bytes: the smallest peak with all weights at home.
    """

    def __init__(self, form: Form, start: Candidate, weights: Sequence[_Weight]) -> None:
        graph, costs = form.graph, form.costs
        self._graph, self._costs, self._start = graph, costs, start
        steps = start.schedule.steps
        self._num_forward = len(start.schedule.forward)
        self._live: Ints = np.array(start.simulation.live_bytes, dtype=np.int64)
        times = [each.time_ms for each in start.schedule.run_costs(costs)]
        self._begin_ms: Floats = np.concatenate([[0.0], np.cumsum(times)])
        known = {each.storage: each for each in weights}
        self._reads: dict[int, list[int]] = {each.storage: [] for each in weights}
        for position, index in enumerate(steps):
            for storage in graph.ops[index].reads:
                if storage.index in known:
                    self._reads[storage.index].append(position)
        self._known = known
        self.least_bytes = int((self._live + self._read_bytes(known)).max())

    def _read_bytes(self, storages: Iterable[int]) -> Ints:
        """Bytes of some weights that each run reads."""
        found = np.zeros(len(self._live), dtype=np.int64)
        for storage in storages:
            found[self._reads[storage]] += self._known[storage].num_bytes
        return found

    def candidate(
        self, residents: frozenset[int], budget_bytes: int, reserve: float
    ) -> Candidate | None:
        """The schedule with fetches of all but some weights; None if it is beyond the budget."""
        away = [each for each in self._known.values() if each.storage not in residents]
        resident_bytes = _sum(self._known.values()) - _sum(away)
        room = budget_bytes - resident_bytes - self._live
        room = room - self._read_bytes(frozenset(each.storage for each in away))
        if room.min() < 0:
            return None
        reserved = int(reserve * max((each.num_bytes for each in away), default=0))
        stretches = self._stretches(away, room, reserved)
        schedule = replace(self._start.schedule, fetches=self._fetches(stretches, room))
        simulation = simulate(self._graph, schedule, self._costs)
        if simulation.peak_bytes > budget_bytes - resident_bytes:
            return None
        return Candidate(
            schedule=schedule,
            simulation=simulation,
            is_proved=self._start.is_proved,
            resident_bytes=resident_bytes,
        )

    def _stretches(
        self, away: Sequence[_Weight], room: Ints, reserved: int
    ) -> list[tuple[int, int, _Weight]]:
        """First and last read of each stretch in which a weight is in memory, by the first.

        `room` loses what is kept between reads.
        """
        gaps: list[tuple[float, int, int, _Weight]] = []
        for weight in away:
            reads = self._reads[weight.storage]
            for one, other in pairwise(reads):
                if self._graph.num_in_flight > 1 and one < self._num_forward <= other:
                    continue  # all forwards in flight would hold it
                gaps.append((self._begin_ms[other] - self._begin_ms[one + 1], one, other, weight))
        kept: set[tuple[int, int]] = set()
        for length_ms, one, other, weight in sorted(gaps, key=lambda gap: gap[:3]):
            between = room[one + 1 : other]
            spare = reserved if length_ms > weight.copy_ms else 0
            if not len(between) or between.min() >= weight.num_bytes + spare:
                between -= weight.num_bytes
                kept.add((weight.storage, other))
        found: list[tuple[int, int, _Weight]] = []
        for weight in away:
            for read in self._reads[weight.storage]:
                if (weight.storage, read) in kept:
                    first, _, _ = found.pop()
                    found.append((first, read, weight))
                else:
                    found.append((read, read, weight))
        return sorted(found, key=lambda stretch: stretch[:2])

    def _fetches(
        self, stretches: Sequence[tuple[int, int, _Weight]], room: Ints
    ) -> tuple[Fetch, ...]:
        """The fetch of each stretch, begun as early as there is room, none before an earlier one.

        `room` loses what is on its way.
        """
        fetches: list[Fetch] = []
        free_from = {weight.storage: 0 for _, _, weight in stretches}
        begun = 0
        for first, last, weight in stretches:
            half = self._num_forward if first >= self._num_forward else 0
            earliest = min(first, max(half, begun, free_from[weight.storage]))
            full = np.flatnonzero(room[earliest:first] < weight.num_bytes)
            issue = earliest + int(full[-1]) + 1 if len(full) else earliest
            room[issue:first] -= weight.num_bytes
            begun = issue
            free_from[weight.storage] = last + 1
            fetches.append(Fetch(storage=weight.storage, fetch=issue, fetched=first, last=last))
        return tuple(fetches)


def _weights_of(form: Form, with_trained: bool) -> list[_Weight]:
    """The weights of a form that can be at home, in the order of their first reads."""
    graph, link = form.graph, form.costs.link
    assert link is not None
    named = named_weights(form.step.model, with_trained=with_trained)
    held = {graph.storage_of[node] for node, _ in graph.outputs if node in graph.storage_of}
    storages = dict.fromkeys(
        graph.storage_of[node]
        for node, role in graph.inputs
        if role.path in named and graph.storage_of[node] not in held
    )
    # A smaller one takes longer to begin with than to copy.
    least_bytes = link.latency_ms * link.in_gb_per_s * 1e6
    first = {}
    for op in graph.ops:
        for storage in op.reads:
            first.setdefault(storage, op.index)
    chosen = [
        each
        for each in storages
        if each in first and each.num_bytes > least_bytes and not may_be_saved_opaquely(graph, each)
    ]
    return [
        _Weight(each.index, each.num_bytes, link.in_ms(each.num_bytes))
        for each in sorted(chosen, key=first.__getitem__)
    ]


def _residents(weights: Sequence[_Weight], room_bytes: int) -> Iterator[frozenset[int]]:
    """Choices of weights that stay, of so many bytes at most."""
    sizes = sorted(each.num_bytes for each in weights)
    large = [each for each in weights if each.num_bytes >= _OUTLIER * sizes[len(sizes) // 2]]
    for kept in ([], large) if large else ([],):
        left_bytes = room_bytes - _sum(kept)
        if left_bytes >= 0:
            others = [each for each in weights if each not in kept]
            yield frozenset(each.storage for each in (*kept, *_spread(others, left_bytes)))


def _spread(weights: Sequence[_Weight], room_bytes: int) -> list[_Weight]:
    """Weights of so many bytes: the first ones for a part of it, the others evenly spread."""
    total, chosen = _sum(weights), list[_Weight]()
    if total <= room_bytes:
        return [*weights]
    taken, rest = 0, list[_Weight]()
    for weight in weights:
        if not rest and taken + weight.num_bytes <= _FIRST * room_bytes:
            chosen.append(weight)
            taken += weight.num_bytes
        else:
            rest.append(weight)
    share, due = (room_bytes - taken) / max(1, _sum(rest)), 0.0
    for weight in rest:
        due += share * weight.num_bytes
        if due >= weight.num_bytes and taken + weight.num_bytes <= room_bytes:
            chosen.append(weight)
            taken += weight.num_bytes
            due -= weight.num_bytes
    return chosen


def _sum(weights: Iterable[_Weight]) -> int:
    return sum(each.num_bytes for each in weights)
