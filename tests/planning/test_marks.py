"""Marks are kept by every family of schedules, and the lower bound holds with them.

A checker of the tests' own looks at each schedule. The bound is held against schedules of the
searches and against random ones that happen to keep the marks.
"""

from __future__ import annotations

import random

import pytest
from mark_cases import broken, marked_graph, marks_in, random_marked, search_of
from schedules import verify
from small_graphs import SMALL, random_schedule, synthetic_costs

from rockmate.errors import InvalidArgumentError
from rockmate.graph.ir import Graph
from rockmate.planning.candidate import evaluate, with_marks_kept
from rockmate.schedule.schedule import Schedule, baseline_schedule
from rockmate.schedule.simulate import simulate

ROUNDING = 1 - 1e-9
FAMILIES = ("none", "chen", "rotor", "rockmate")


def check(name: str, seed: int, strategies: tuple[str, ...] = FAMILIES) -> int:
    """Plans a small model with random marks; returns the number of schedules looked at."""
    graph, costs, budgets = random_marked(name, seed)
    number = 0
    for strategy in strategies:
        search, bound = search_of(strategy, graph, costs)
        for budget_bytes in (*budgets, search.minimum().peak_bytes):
            found = search.best_within(budget_bytes)
            if found is None:
                continue
            number += 1
            verify(graph, found.schedule)
            assert not broken(graph, found.schedule), f"{strategy} at {budget_bytes}"
            assert found.peak_bytes <= budget_bytes
            assert simulate(graph, found.schedule, costs).peak_bytes == found.peak_bytes
            assert bound.bound_ms(budget_bytes) * ROUNDING <= found.time_ms
    return number


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", SMALL)
def test_every_family_keeps_random_marks(name: str, seed: int) -> None:
    assert check(name, seed) >= len(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 180))
@pytest.mark.parametrize("name", SMALL)
def test_many_random_marks(name: str, seed: int) -> None:
    assert check(name, seed) >= len(FAMILIES)


def test_random_marks_are_of_both_words() -> None:
    words = [
        word
        for name in SMALL
        for seed in range(4)
        for word in marks_in(marked_graph(name, random.Random(seed))).values()
    ]
    assert min(words.count("save"), words.count("recompute")) > 20


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_no_random_schedule_that_keeps_the_marks_beats_the_bound(name: str, in_flight: int) -> None:
    for seed in (0, 7):
        graph, costs, _ = random_marked(name, seed, in_flight=in_flight)
        _, bound = search_of("none", graph, costs)
        rng = random.Random(seed)
        for _ in range(15):
            schedule = with_marks_kept(graph, random_schedule(graph, rng))
            verify(graph, schedule)
            assert not broken(graph, schedule)
            found = simulate(graph, schedule, costs)
            least_ms = bound.bound_ms(found.peak_bytes)
            assert least_ms * ROUNDING <= found.time_ms, (seed, schedule)


def least_forced_ms(graph: Graph) -> float:
    """The least time with memory to spare: each marked value that the backward needs, once more."""
    costs = synthetic_costs(graph)
    again = set()
    pending = [op for op in graph.ops if op.index in baseline_schedule(graph).backward]
    while pending:
        for storage in pending.pop().reads:
            if storage.mark == "recompute" and storage.producer not in again:
                again.add(storage.producer)
                pending.append(storage.producer)
    first_ms = simulate(graph, baseline_schedule(graph), costs).time_ms
    return first_ms + sum(costs.recompute[op.index].time_ms for op in again)


@pytest.mark.parametrize("name", SMALL)
def test_with_memory_to_spare_the_bound_is_reached(name: str) -> None:
    for seed in range(6):
        graph, costs, (peak, *_) = random_marked(name, seed)
        search, bound = search_of("rockmate", graph, costs)
        found = search.best_within(4 * peak)
        assert found is not None
        assert found.time_ms == pytest.approx(least_forced_ms(graph), rel=1e-9)
        assert bound.bound_ms(4 * peak) == pytest.approx(found.time_ms, rel=1e-9)


def test_a_schedule_that_keeps_the_marks_stays_as_it_is() -> None:
    graph, _, _ = random_marked("chain", 0)
    kept = with_marks_kept(graph, baseline_schedule(graph))
    assert with_marks_kept(graph, kept) is kept


def test_the_checkers_agree_that_a_baseline_breaks_recompute_marks() -> None:
    graph, costs, _ = random_marked("chain", 0)
    assert "recompute" in marks_in(graph).values()
    baseline: Schedule = baseline_schedule(graph)
    assert broken(graph, baseline)
    assert not broken(graph, evaluate(graph, baseline, costs).schedule)


def test_the_staged_program_refuses_recompute_marks() -> None:
    graph, costs, _ = random_marked("chain", 0)
    with pytest.raises(InvalidArgumentError, match=r"recompute \d+ values.* Take another"):
        search_of("checkmate", graph, costs)


# --- several forwards in flight -------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_plans_for_several_forwards_fit_and_the_bound_holds(name: str) -> None:
    for in_flight in (2, 5):
        graph, costs, budgets = random_marked(name, 7, in_flight=in_flight)
        single = marked_graph(name, random.Random(7))
        for strategy in ("chen", "rotor", "rockmate"):
            search, bound = search_of(strategy, graph, costs)
            for budget_bytes in (*budgets, search.minimum().peak_bytes):
                found = search.best_within(budget_bytes)
                if found is None:
                    continue
                # The same runs with one forward in flight, on a graph of its own.
                alone = simulate(
                    single, Schedule(found.schedule.forward, found.schedule.backward,
                                     found.schedule.in_place), costs,
                )  # fmt: skip
                whole = alone.peak_bytes + (in_flight - 1) * alone.saved_bytes
                assert found.peak_bytes == whole <= budget_bytes
                assert not broken(graph, found.schedule)
                assert bound.bound_ms(budget_bytes) * ROUNDING <= found.time_ms
