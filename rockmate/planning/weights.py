"""Frozen weights that do not fit: which stay in memory, and when the others are fetched.

A budget then bounds activations and frozen weights together. A plan is chosen in three steps:

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
from math import inf
from typing import NamedTuple

import numpy as np

from rockmate._util import Floats, Ints
from rockmate.bound.protocol import Bounds
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Phase
from rockmate.offload.weight_home import named_weights
from rockmate.planning.candidate import Candidate
from rockmate.planning.form import Form, Found
from rockmate.planning.forms import Forms
from rockmate.planning.strategies import DEFAULT, UNMOVED
from rockmate.schedule.fetch import Fetch
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import simulate

# Budgets of activations that are tried: shares of the baseline's peak, each the last one divided by
# this ratio.
_RATIO = 1.35
# Shares of the room for weights that residents take, and of it that those take which are read first.
_SHARES, _FIRST = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0), 0.1
# Bytes that are left to copies, in largest weights.
_RESERVES = (0.0, 1.0, 3.0)
# A weight that is so many times as large as the middle one is kept before others.
_OUTLIER = 3
_NUM_REFINEMENTS = 2


class PlannedWeights(NamedTuple):
    """A plan for a budget that bounds frozen weights, too.

    Attributes:
        found: the schedule, with its fetches, and its form.
        resident_bytes: of the weights that stay in memory.
    """

    found: Found
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight that can be at home: its storage, bytes and the time of a copy."""

    storage: int
    num_bytes: int
    copy_ms: float


class WeightSearch:
    """The search for plans whose frozen weights come and go.

    Args:
        forms: of the step, whose plans keep all weights in memory.
    """

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._within = cache(forms.best_within)
        self._weights: dict[Form, list[_Weight]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights that can be at home."""
        return _sum(self.weights(self._forms.captured))

    def best_within(self, budget_bytes: int, strategy: str) -> PlannedWeights | None:
        """The fastest plan found within a budget; None if none fits."""
        all_bytes = self.num_bytes
        resident = self._forms.best_within(budget_bytes - all_bytes, strategy)
        best = None if resident is None else PlannedWeights(resident, all_bytes)
        bound_ms = self._forms.captured.baseline.time_ms
        if best is not None and best.found.time_ms <= bound_ms:
            return best
        for start in self._starts(budget_bytes, strategy):
            if start.time_ms < (inf if best is None else best.found.time_ms):
                best = self._fetched(start, budget_bytes, best)
        return best

    def minimum(self, strategy: str) -> int:
        """The smallest budget with a plan, as far as fetches right before each read find it."""
        return self._placement(self._smallest(strategy)).least_bytes

    def whole_minimum(self, strategy: str) -> int:
        """The same without chunks."""
        start = Found(self._forms.captured, self._forms.minimum(strategy))
        return self._placement(start).least_bytes

    def bounds_within(self, budget_bytes: int) -> Bounds:
        """Bounds that hold with weights at home: those of activations, and the time of copies."""
        return _WeightBounds(self._forms.bounds_within(budget_bytes), budget_bytes, self._copy_ms)

    def _copy_ms(self, budget_bytes: int) -> float:
        """The least time of copies: what each half reads beyond the budget has to be fetched."""
        form = self._forms.captured
        weights, link = self.weights(form), form.costs.link
        assert link is not None
        late = {s.index for op in form.graph.ops if op.phase is Phase.BACKWARD for s in op.reads}
        halves = _sum(weights), _sum([each for each in weights if each.storage in late])
        missing = sum(max(0, num_bytes - budget_bytes) for num_bytes in halves)
        return missing / (link.in_gb_per_s * 1e6)

    def weights(self, form: Form) -> list[_Weight]:
        """The weights of a form that can be at home, in the order of their first reads."""
        if form not in self._weights:
            self._weights[form] = _weights_of(form)
        return self._weights[form]

    def _starts(self, budget_bytes: int, strategy: str) -> Iterator[Found]:
        """Schedules with all weights in memory, for smaller and smaller budgets."""
        smallest = self._smallest(strategy)
        ways = (UNMOVED, DEFAULT) if strategy == DEFAULT else (strategy,)
        start_bytes = self._forms.captured.baseline.peak_bytes
        while start_bytes > smallest.candidate.peak_bytes:
            if start_bytes <= budget_bytes:
                found = (self._within(start_bytes, way) for way in ways)
                yield from filter(None, found)
            start_bytes = int(start_bytes / _RATIO)
        yield smallest

    def _smallest(self, strategy: str) -> Found:
        """The schedule of the smallest peak, with all weights in memory."""
        found = self._within(self._forms.min_peak(strategy).peak_bytes, strategy)
        assert found is not None
        return found

    def _placement(self, start: Found) -> _Placement:
        form, candidate = start
        weights = self.weights(form)
        return _Placement(form.graph, form.costs, candidate, weights)

    def _fetched(
        self, start: Found, budget_bytes: int, best: PlannedWeights | None
    ) -> PlannedWeights | None:
        """The best of the plans that a start gives, and another."""
        placement = self._placement(start)
        room_bytes = budget_bytes - placement.least_bytes
        if room_bytes < 0:
            return best
        times: dict[float, float] = {}
        shares: Sequence[float] = _SHARES
        for _ in range(_NUM_REFINEMENTS + 1):
            for share in shares:
                times[share] = inf
                for residents in self._residents(start.form, int(share * room_bytes)):
                    for reserve in _RESERVES:
                        found = placement.candidate(residents, budget_bytes, reserve)
                        if found is None:
                            continue
                        times[share] = min(times[share], found.time_ms)
                        if found.time_ms < (inf if best is None else best.found.time_ms):
                            own = [w for w in self.weights(start.form) if w.storage in residents]
                            best = PlannedWeights(Found(start.form, found), _sum(own))
            shares = _between(times)
        return best

    def _residents(self, form: Form, room_bytes: int) -> Iterator[frozenset[int]]:
        """Choices of weights that stay, of so many bytes at most."""
        weights = self.weights(form)
        if not weights:
            return
        middle = sorted(each.num_bytes for each in weights)[len(weights) // 2]
        large = [each for each in weights if each.num_bytes >= _OUTLIER * middle]
        for kept in ([], large) if large else ([],):
            left_bytes = room_bytes - _sum(kept)
            if left_bytes < 0:
                continue
            others = [each for each in weights if each not in kept]
            yield frozenset(
                each.storage for each in (*kept, *_spread(others, left_bytes))
            )


class _Placement:
    """A schedule, and what it takes to fetch weights in it.

    Attributes:
        least_bytes: the smallest peak with all weights at home.
    """

    def __init__(
        self, graph: Graph, costs: Costs, start: Candidate, weights: Sequence[_Weight]
    ) -> None:
        self._graph, self._costs, self._start = graph, costs, start
        steps = start.schedule.steps
        self._num_forward = len(start.schedule.forward)
        self._live: Ints = np.array(start.simulation.live_bytes, dtype=np.int64)
        times = _times_ms(start.schedule, costs)
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
            schedule=schedule, simulation=simulation, is_proved=self._start.is_proved
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
            for one, other in zip(reads, reads[1:], strict=False):
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
            earliest = max(half, begun, free_from[weight.storage])
            ahead = room[earliest:first]
            full = np.flatnonzero(ahead < weight.num_bytes)
            issue = earliest + (int(full[-1]) + 1 if len(full) else 0) if first > earliest else first
            room[issue:first] -= weight.num_bytes
            begun = issue
            free_from[weight.storage] = last + 1
            fetches.append(Fetch(storage=weight.storage, fetch=issue, fetched=first, last=last))
        return tuple(fetches)


@dataclass(frozen=True, slots=True)
class _WeightBounds:
    """Bounds for a budget that bounds weights, whatever part of it activations have."""

    activations: Bounds
    budget_bytes: int
    copy_ms: Callable[[int], float]

    def bound_ms(self, budget_bytes: int) -> float:
        """See `Bounds.bound_ms`."""
        del budget_bytes
        return max(self.activations.bound_ms(self.budget_bytes), self.copy_ms(self.budget_bytes))

    def tight_bound_ms(self, budget_bytes: int) -> float:
        """See `Bounds.tight_bound_ms`."""
        del budget_bytes
        quick_ms = self.copy_ms(self.budget_bytes)
        return max(self.activations.tight_bound_ms(self.budget_bytes), quick_ms)


def _weights_of(form: Form) -> list[_Weight]:
    graph, link = form.graph, form.costs.link
    assert link is not None
    named = named_weights(form.step.model)
    held = {graph.storage_of[node] for node, _ in graph.outputs if node in graph.storage_of}
    storages = dict.fromkeys(
        graph.storage_of[node]
        for node, role in graph.inputs
        if role.name in named and not role.inner and graph.storage_of[node] not in held
    )
    # A smaller one takes longer to begin with than to copy.
    least_bytes = link.latency_ms * link.in_gb_per_s * 1e6
    first = {}
    for op in graph.ops:
        for storage in op.reads:
            first.setdefault(storage, op.index)
    chosen = [each for each in storages if each in first and each.num_bytes > least_bytes]
    return [
        _Weight(each.index, each.num_bytes, link.in_ms(each.num_bytes))
        for each in sorted(chosen, key=first.__getitem__)
    ]


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


def _between(times: dict[float, float]) -> list[float]:
    """The middles between the best of some shares and its neighbours."""
    best = min(times, key=times.__getitem__)
    ordered = sorted(times)
    place = ordered.index(best)
    around = ordered[max(place - 1, 0) : place + 2]
    return [(one + other) / 2 for one, other in zip(around, around[1:], strict=False)]


def _times_ms(schedule: Schedule, costs: Costs) -> list[float]:
    recomputed = set(schedule.recomputed_positions())
    return [
        (costs.recompute if position in recomputed else costs.first)[index].time_ms
        for position, index in enumerate(schedule.steps)
    ]


def _sum(weights: Iterable[_Weight]) -> int:
    return sum(each.num_bytes for each in weights)
