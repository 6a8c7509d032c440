"""Live intervals that are kept up to date, against those of the changed schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from schedules import verify
from small_graphs import SMALL, fixed, graph_and_costs, random_schedule, small

from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.planning.live_ranges import LiveRanges
from rockmate.schedule.schedule import Schedule
from rockmate.schedule.simulate import simulate

NUM_TRIED = 4


def ranges_of(graph: Graph, costs: Costs, schedule: Schedule) -> LiveRanges:
    return LiveRanges(graph, costs, schedule, simulate(graph, schedule, costs))


def remove(ranges: LiveRanges, rng: random.Random) -> bool:
    """Removes a random recomputation, if there is one."""
    schedule = ranges._schedule  # pyright: ignore[reportPrivateUsage]
    repeated = [p for p in schedule.recomputed_positions() if not ranges.is_dropped(p)]
    if not repeated:
        return False
    position = rng.choice(repeated)
    ranges.drop(position, ranges.extensions_for_drop(position))
    return True


def evict(ranges: LiveRanges, rng: random.Random) -> bool:
    """Evicts a random value at a random position, if there is one."""
    position = rng.randrange(len(ranges.live_bytes))
    candidates = ranges.gaps_around(position).storage.tolist()
    if not candidates:
        return False
    gap = ranges.gap_around(storage := rng.choice(candidates), position)
    recomputation = ranges.recomputation(storage, gap[1]) if gap else None
    if not gap or not recomputation:
        return False
    ranges.evict(recomputation, gap)
    return True


def live_across(ranges: LiveRanges, position: int) -> set[int]:
    """Storages that are live before and after a position and not accessed there."""
    return {
        storage.index
        for storage in ranges.graph.storages
        if storage.producer and ranges.gap_around(storage.index, position)
    }


def positions_after(ranges: LiveRanges, num_positions: int) -> dict[int, range]:
    """For each remaining run, its positions after the changes: inserted ops before it, itself."""
    after, shift = {}, 0
    for position in range(num_positions):
        num_inserted = len(ranges._inserted.get(position, ()))
        first = position + shift
        shift += num_inserted
        if ranges.is_dropped(position):
            shift -= 1
        else:
            after[position] = range(first, first + num_inserted + 1)
    return after


def all_cases(name: str, number: int) -> Iterator[tuple[Graph, Costs, Schedule]]:
    graph, costs = small(name) if name in SMALL else graph_and_costs(fixed(name).planner)
    rng = random.Random(11)
    for _ in range(number):
        yield graph, costs, random_schedule(graph, rng, any_order=name in SMALL)


NAMES = [*((name, 30) for name in SMALL), ("gpt2", 4), ("hf-resnet", 4)]


@pytest.mark.parametrize(("name", "number"), NAMES)
def test_after_removals_live_intervals_are_those_of_the_changed_schedule(
    name: str, number: int
) -> None:
    rng, num_removed = random.Random(3), 0
    for graph, costs, schedule in all_cases(name, number):
        ranges = ranges_of(graph, costs, schedule)
        num_removed += sum(remove(ranges, rng) for _ in range(NUM_TRIED))
        changed = ranges.schedule()
        verify(graph, changed)
        expected, simulation = ranges_of(graph, costs, changed), simulate(graph, changed, costs)
        for before, after in positions_after(ranges, len(schedule.steps)).items():
            assert live_across(ranges, before) == live_across(expected, after[0])
            assert ranges.live_bytes[before] >= simulation.live_bytes[after[0]]
    assert num_removed > number


@pytest.mark.parametrize(("name", "number"), NAMES)
def test_after_evictions_no_live_interval_is_missed(name: str, number: int) -> None:
    """Some may be too long: memory that an eviction frees besides is not looked for."""
    rng, num_evicted = random.Random(3), 0
    for graph, costs, schedule in all_cases(name, number):
        ranges = ranges_of(graph, costs, schedule)
        num_tried = sum(evict(ranges, rng) for _ in range(NUM_TRIED))
        changed = ranges.schedule()
        verify(graph, changed)
        groups = positions_after(ranges, len(schedule.steps))
        if len(changed.steps) != max(group[-1] for group in groups.values()) + 1:
            continue  # an eviction left a dead run, which `schedule` removes
        expected = ranges_of(graph, costs, changed)
        for before, after in groups.items():
            across = set.intersection(*(live_across(expected, position) for position in after))
            assert live_across(ranges, before) >= across
        num_evicted += num_tried
    assert num_evicted
