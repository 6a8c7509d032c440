"""What a point of the forward holds is held in every schedule, and no schedule beats its bound.

Schedules are random ones of other code, with values forgotten and made again at any time.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
from small_graphs import SMALL, candidates, random_schedule, small, synthetic_costs

import rockmate.bound.forward_point
from bench import models
from rockmate import Planner
from rockmate.bound.forward_point import forward_points
from rockmate.bound.lower_bound import LowerBound
from rockmate.bound.program_point import ProgramPoint, ProgramPoints
from rockmate.costs.cost import Costs
from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.ir import Graph
from rockmate.graph.step_options import StepOptions
from rockmate.planning.step import CapturedStep, capture_step
from rockmate.schedule.schedule import Schedule, baseline_schedule
from rockmate.schedule.simulate import simulate

AT_ONCE = "llama in chunks at once"
NAMES = (*SMALL, AT_ONCE)
ROUNDING = 1 - 1e-9


@functools.cache
def graph_of(name: str) -> tuple[Graph, Costs]:
    if name != AT_ONCE:
        return small(name)
    workload = models.build("llama", tiny=True).with_loss_inside()
    step = capture_step(workload.model, workload.sample, StepOptions(outputs="loss"))
    chunked = step.in_chunks(Chunks.parse("4 at_once"))
    assert isinstance(chunked, CapturedStep)
    return chunked.graph, synthetic_costs(chunked.graph)


@functools.cache
def schedules_of(name: str) -> tuple[Schedule, ...]:
    if name != AT_ONCE:
        return tuple(candidates(name, 150))
    rng = random.Random(5)
    graph, _ = graph_of(name)
    return tuple(random_schedule(graph, rng) for _ in range(60))


def all_points(name: str, monkeypatch: pytest.MonkeyPatch) -> list[ProgramPoint]:
    """A point for each forward op that needs more bytes than those that follow."""
    graph, costs = graph_of(name)
    monkeypatch.setattr(rockmate.bound.forward_point, "_MAX_POINTS", 1_000)
    backward = [graph.ops[index] for index in baseline_schedule(graph).backward]
    return forward_points(ProgramPoints(graph, costs), backward, -1)


def bound_of(name: str, points: list[ProgramPoint]) -> LowerBound:
    """The bound of these points of the forward alone."""
    graph, costs = graph_of(name)
    least_ms = simulate(graph, baseline_schedule(graph), costs).time_ms
    bound = LowerBound(graph, costs, least_ms)
    bound.program_points.__dict__["rising"] = ()
    bound.__dict__["_forward_points"] = points
    return bound


def num_beaten(name: str, points: list[ProgramPoint]) -> int:
    """How many schedules beat the bound of these points."""
    graph, costs = graph_of(name)
    bound = bound_of(name, points)
    figures = (simulate(graph, schedule, costs) for schedule in schedules_of(name))
    return sum(found.time_ms < bound.bound_ms(found.peak_bytes) * ROUNDING for found in figures)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_point_holds_is_held_in_every_schedule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, costs = graph_of(name)
    points = all_points(name, monkeypatch)
    assert points
    for schedule in schedules_of(name):
        live_bytes = simulate(graph, schedule, costs).live_bytes
        for point in points:
            position = schedule.steps.index(point.op.index)
            assert live_bytes[position] >= point.min_bytes, f"{point.op} at {position}"
            earlier = set(schedule.steps[:position])
            assert earlier.isdisjoint(op.index for op in point.after)
            assert earlier.issuperset(op.index for op in point.before)


@pytest.mark.parametrize("name", NAMES)
def test_no_schedule_beats_the_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_beaten(name, all_points(name, monkeypatch)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_bound_that_counts_too_much_memory_is_found_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, costs = graph_of(name)
    more_bytes = simulate(graph, baseline_schedule(graph), costs).peak_bytes // 2
    points = all_points(name, monkeypatch)
    wrong = [replace(point, min_bytes=point.min_bytes + more_bytes) for point in points]
    assert num_beaten(name, wrong) > 0


def test_a_bound_that_takes_the_whole_forward_for_earlier_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beaten = 0
    for name in SMALL:
        ops = graph_of(name)[0].forward_ops
        points = all_points(name, monkeypatch)
        beaten += num_beaten(name, [replace(point, before=ops) for point in points])
    assert beaten > 0


def test_chunks_at_once_need_their_memory_in_the_forward() -> None:
    graph, costs = graph_of(AT_ONCE)
    baseline = simulate(graph, baseline_schedule(graph), costs)
    both = LowerBound(graph, costs, baseline.time_ms)
    alone = LowerBound(graph, costs, baseline.time_ms)
    alone.__dict__["_forward_points"] = []
    lifts = []
    for share in (0.3, 0.4, 0.5, 0.6, 0.7):
        budget_bytes = int(share * baseline.peak_bytes)
        assert both.bound_ms(budget_bytes) >= alone.bound_ms(budget_bytes)
        lifts.append(both.bound_ms(budget_bytes) / alone.bound_ms(budget_bytes) - 1)
    assert max(lifts) > 0.01


def test_pairs_of_points_are_of_the_backward() -> None:
    workload = models.build("mlp", tiny=True).with_loss_inside()  # its loss needs a workspace
    planner = Planner(workload.model, workload.sample)
    plan = planner.plan(1.0)
    assert plan.lower_bound_ms == planner.baseline_ms == plan.predicted_ms


def test_forwards_in_flight_have_no_points_in_the_forward() -> None:
    graph, costs = graph_of("chain")
    backward = [graph.ops[index] for index in baseline_schedule(graph).backward]
    for num_in_flight in (1, 2):
        points = ProgramPoints(replace(graph, num_in_flight=num_in_flight), costs)
        assert bool(forward_points(points, backward, -1)) == (num_in_flight == 1)
