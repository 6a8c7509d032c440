"""Schedules changed run by run stay valid, fit, cost no more than they should, and compute the same
numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import assert_same, train, workload_loss
from schedules import verify
from small_graphs import (
    SMALL,
    candidates,
    fixed,
    graph_and_costs,
    random_schedule,
    schedule_of,
    small,
)

from bench import models
from bench.unet import UNet
from rockmate import Planner, RockmateModule
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.planning.live_ranges import LiveRanges
from rockmate.planning.local_search import LocalSearch
from rockmate.planning.moves import remove_recomputations, spill_until_feasible
from rockmate.planning.search_problem import SearchProblem
from rockmate.schedule.schedule import Schedule, baseline_schedule
from rockmate.schedule.simulate import Simulation, simulate

SHARES_BELOW = (0.6, 0.8, 0.95)
SHARES_ABOVE = (1.0, 1.2, 1.6)


def cases(name: str, number: int) -> Iterator[tuple[Graph, Costs, Schedule, Simulation]]:
    """Random schedules of a small model, or of a tiny one."""
    graph, costs = small(name) if name in SMALL else graph_and_costs(fixed(name).planner)
    rng = random.Random(number)
    for _ in range(number):
        schedule = random_schedule(graph, rng, any_order=name in SMALL)
        yield graph, costs, schedule, simulate(graph, schedule, costs)


@pytest.mark.parametrize(
    ("name", "number"),
    [*((name, 80) for name in SMALL), ("gpt2", 5), ("hf-resnet", 8), ("llama", 5)],
)
def test_spending_room_fits_and_is_never_slower(name: str, number: int) -> None:
    num_faster = 0
    for graph, costs, schedule, simulation in cases(name, number):
        for share in SHARES_ABOVE:
            budget_bytes = int(simulation.peak_bytes * share)
            better = remove_recomputations(graph, costs, schedule, simulation, budget_bytes)
            verify(graph, better)
            found = simulate(graph, better, costs)
            assert found.peak_bytes <= budget_bytes
            assert found.time_ms <= simulation.time_ms * (1 + 1e-12)
            assert better.num_recomputations() <= schedule.num_recomputations()
            num_faster += found.time_ms < simulation.time_ms
    assert num_faster > number


@pytest.mark.parametrize("name", SMALL)
def test_with_all_the_room_nothing_is_recomputed(name: str) -> None:
    for graph, costs, schedule, simulation in cases(name, 40):
        found = remove_recomputations(graph, costs, schedule, simulation, 1 << 50)
        assert found.num_recomputations() == 0


def _made_room(name: str, number: int) -> tuple[int, int]:
    """How many schedules could be made to fit by the estimate, and how many of them do not fit."""
    num_made = num_over = 0
    for graph, costs, schedule, simulation in cases(name, number):
        for share in SHARES_BELOW:
            budget_bytes = int(simulation.peak_bytes * share)
            smaller = spill_until_feasible(graph, costs, schedule, simulation, budget_bytes)
            if smaller is None:
                continue
            verify(graph, smaller)
            num_made += 1
            num_over += simulate(graph, smaller, costs).peak_bytes > budget_bytes
    return num_made, num_over


@pytest.mark.parametrize(("name", "number"), [("chain", 100), ("branches", 100), ("mlp", 20)])
def test_room_that_was_made_is_there(name: str, number: int) -> None:
    num_made, num_over = _made_room(name, number)
    assert num_made > number // 2
    assert num_over == 0


@pytest.mark.parametrize(("name", "number"), [("dropout", 60), ("llama", 6)])
def test_room_that_was_made_is_there_in_graphs_of_any_kind(name: str, number: int) -> None:
    _, num_over = _made_room(name, number)
    assert num_over == 0


@pytest.mark.parametrize("name", SMALL)
def test_making_room_takes_a_plain_step_well_below_its_peak(name: str) -> None:
    graph, costs = small(name)
    schedule = baseline_schedule(graph)
    simulation = simulate(graph, schedule, costs)
    fitting = []
    for percent in range(99, 30, -1):
        smaller = spill_until_feasible(
            graph, costs, schedule, simulation, simulation.peak_bytes * percent // 100
        )
        if (
            smaller is not None
            and (found := simulate(graph, smaller, costs)).peak_bytes
            <= simulation.peak_bytes * percent // 100
        ):
            fitting.append(percent)
            assert found.time_ms > simulation.time_ms
    # in the same order of the backward
    one_level = [simulate(graph, candidate, costs).peak_bytes for candidate in candidates(name, 0)]
    assert min(fitting) <= min(one_level) * 100 // simulation.peak_bytes + 15


@pytest.mark.parametrize("name", SMALL)
def test_dropping_a_run_is_counted_to_the_byte_or_above(name: str) -> None:
    """One change at a time, against the simulator at every run."""
    for graph, costs, schedule, simulation in cases(name, 25):
        for position in schedule.recomputed_positions():
            ranges = LiveRanges(graph, costs, schedule, simulation)
            ranges.drop(position, ranges.extensions_for_drop(position))
            assert simulate(graph, ranges.schedule(), costs).peak_bytes <= ranges.live_bytes.max()


@dataclass
class Given:
    """Random schedules in place of what solvers propose, and no bound."""

    schedules: list[Schedule]

    def bound_ms(self, budget_bytes: int) -> float:
        return 0.0

    def from_relaxation(self, budget_bytes: int) -> Schedule | None:
        return self.schedules[0]

    def from_knapsack(self, max_saved_bytes: int) -> Schedule | None:
        return self.schedules[1]

    def small(self) -> list[Schedule]:
        return self.schedules[2:]


def test_a_search_gives_nothing_that_does_not_fit_and_nothing_slower_than_it_was_given() -> None:
    num_improved = {name: _num_improved(name) for name in SMALL}
    # a model of few values may have nothing to gain
    assert sum(num_improved.values()) > 3 * len(SMALL), num_improved


def _num_improved(name: str) -> int:
    """For how many budgets a search beats the random schedules that it is given."""
    graph, costs = small(name)
    rng = random.Random(7)
    schedules = [random_schedule(graph, rng) for _ in range(12)]
    search = LocalSearch(SearchProblem(graph, costs, Given(schedules)))
    given = [
        simulate(graph, schedule, costs) for schedule in [*schedules, baseline_schedule(graph)]
    ]
    low, high = min(one.peak_bytes for one in given), max(one.peak_bytes for one in given)
    num_improved = 0
    for budget_bytes in range(low, high + 1, max(1, (high - low) // 20)):
        best = search.best_within(budget_bytes)
        assert best is not None
        verify(graph, best.schedule)
        found = simulate(graph, best.schedule, costs)
        assert found.peak_bytes <= budget_bytes
        least_ms = min(one.time_ms for one in given if one.peak_bytes <= budget_bytes)
        assert found.time_ms <= least_ms
        num_improved += found.time_ms < least_ms
    return num_improved


def test_rounds_find_faster_plans_near_the_smallest_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = UNet(num_levels=2, base_width=8, classes=4).train(), torch.zeros(2, 3, 64, 64)
    planner, recompute, greedy = (
        Planner(model, image, machine="cpu-avx2", numerics="bitwise") for _ in range(3)
    )
    shares = []
    budgets = [int(factor * planner.minimum_peak_bytes) for factor in (1.03, 1.1, 1.15)]
    backwards = {
        budget_bytes: recompute.plan(budget_bytes).schedule for budget_bytes in reversed(budgets)
    }
    for budget_bytes in budgets:
        plan = planner.plan(budget_bytes)
        verify(plan.graph, plan.schedule)
        assert simulate(plan.graph, plan.schedule, plan.costs).peak_bytes <= budget_bytes
        assert backwards[budget_bytes] == plan.schedule
        with monkeypatch.context() as patch:
            patch.setattr("rockmate.planning.local_search._STALL_OPS", 0)
            shares.append(plan.predicted_ms / greedy.plan(budget_bytes).predicted_ms)
    assert max(shares) <= 1
    assert min(shares) < 0.99


@pytest.mark.parametrize("name", ["convnext", "unet", "llama", "resnet50"])
def test_a_little_more_than_the_minimum_is_not_slower_than_the_minimum(name: str) -> None:
    workload = models.build(name, tiny=True).with_loss_inside()
    planner = Planner(workload.model, workload.sample, machine="cpu-avx2", numerics="bitwise")
    at_minimum = planner.plan(planner.minimum_peak_bytes)
    for factor in (1.01, 1.02, 1.03):
        plan = planner.plan(int(factor * planner.minimum_peak_bytes))
        is_near_bound = plan.predicted_ms <= plan.lower_bound_ms + 0.02 * planner.baseline_ms
        assert is_near_bound or plan.predicted_ms <= at_minimum.predicted_ms


@pytest.mark.parametrize("name", ["gpt2", "hf-resnet"])
def test_gradients_of_a_changed_schedule_are_eagers_bit_for_bit(name: str) -> None:
    case = fixed(name)
    plan = case.planner.plan(case.planner.minimum_peak_bytes)
    graph, costs = plan.graph, plan.costs
    rng = random.Random(3)
    scattered = random_schedule(graph, rng, any_order=False)
    lost = {storage for op in graph.forward_ops for storage in op.writes if rng.random() < 0.5}
    baseline = simulate(graph, baseline_schedule(graph), costs)
    reference_model = case.eager()
    reference = train(reference_model, reference_model, workload_loss(case.workload), 1)[0]
    changed = [
        spill_until_feasible(
            graph, costs, baseline_schedule(graph), baseline, baseline.peak_bytes * 2 // 3
        )
    ]
    for schedule in (scattered, schedule_of(graph, lost)):
        simulation = simulate(graph, schedule, costs)
        changed.append(
            remove_recomputations(graph, costs, schedule, simulation, baseline.peak_bytes)
        )
        changed.append(
            spill_until_feasible(
                graph, costs, schedule, simulation, int(0.9 * simulation.peak_bytes)
            )
        )
    schedules = [schedule for schedule in changed if schedule is not None]
    assert len(schedules) >= 4
    assert all(schedule.num_recomputations() > 0 for schedule in schedules)
    for schedule in schedules:
        owner = case.workload.model
        owner.load_state_dict(case.before)
        owner.zero_grad(set_to_none=True)
        ours = replace(plan, schedule=schedule, simulation=simulate(graph, schedule, costs))
        module = RockmateModule.of(owner, case.planner._step.planned_call(ours), trial="log")
        assert_same(train(module, owner, workload_loss(case.workload), 1)[0], reference)
