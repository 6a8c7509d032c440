"""Gradients of parameters that are put off.

Only those that may be, within the budget, bit for bit eager's, and for faster plans.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import assert_same, differing, gradients_of, train, workload_loss
from schedules import verify
from small_graphs import SMALL, fixed, graph_and_costs, random_schedule, small
from torch import Tensor, nn

from bench.unet import UNet
from rockmate import Planner, RockmateModule
from rockmate.graph.ir import Graph, Op, Phase
from rockmate.planning.deferral import (
    defer,
    deferrable_ops,
    first_readers,
    insertion_points,
    result_and_workspace_bytes,
)
from rockmate.planning.step import capture_step
from rockmate.schedule.schedule import Schedule, baseline_schedule
from rockmate.schedule.simulate import simulate


class Shared(nn.Module):
    """One matrix under two names between two layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(16, 16) for _ in range(4))
        self.third.weight = self.second.weight

    def forward(self, vectors: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(vectors))))
        return self.last(torch.tanh(self.third(x))).square().mean()


def all_put_off(graph: Graph, schedule: Schedule, rng: random.Random) -> Schedule:
    """Every run that may wait, at a random place behind it and not behind what reads its result."""
    for op in sorted(deferrable_ops(graph), key=lambda op: op.index):
        position = schedule.steps.index(op.index)
        readers = {
            reader.index for storage in op.writes for reader in graph.readers.get(storage, ())
        }
        places = (place for place, step in enumerate(schedule.steps) if step in readers)
        last = min(places, default=len(schedule.steps))
        if position + 1 < last:
            schedule = defer(graph, schedule, position, rng.randint(position + 2, last))
    return schedule


def test_parts_of_a_sum_of_the_sink_stay() -> None:
    graph = capture_step(Shared(), torch.randn(8, 16)).graph
    waiting = deferrable_ops(graph)
    delivering: dict[str, list[Op]] = {}
    for op in graph.ops:
        for _, role in op.final_gradients:
            delivering.setdefault(
                role.name.partition(".")[0] if role.name.endswith("weight") else role.name, []
            ).append(op)
    assert waiting.issuperset(delivering["first"] + delivering["last"])
    assert waiting.isdisjoint(delivering["second"] + delivering.get("third", []))
    assert all(op.phase is Phase.BACKWARD for op in waiting)


def test_what_hooks_of_another_gradient_wait_for_stays() -> None:
    """The gradient of an input reads the weight.

    Made later, a tensor hook's whole gradient would wait for it, which nobody counts.
    """
    first = nn.Linear(32, 16)
    first.weight.register_hook(lambda _: None)
    vectors = torch.randn(8, 32, requires_grad=True)
    graph = capture_step(nn.Sequential(first, nn.ReLU(), nn.Linear(16, 4)), vectors).graph
    (weight,) = [graph.storage_of[node] for node, role in graph.inputs if role.name == "0.weight"]
    (maker,) = [
        op for op in graph.ops if any(role.name == "0.weight" for _, role in op.final_gradients)
    ]
    (reader,) = [op for op in graph.readers[weight] if op.phase is Phase.BACKWARD]
    assert maker in deferrable_ops(graph)
    assert reader is not maker
    assert reader not in deferrable_ops(graph)


@pytest.mark.parametrize("name", [*SMALL, "hf-resnet", "llama"])
def test_schedules_with_runs_put_off_compute_the_step_and_take_no_longer(name: str) -> None:
    graph, costs = small(name) if name in SMALL else graph_and_costs(fixed(name).planner)
    rng = random.Random(5)
    for _ in range(20):
        schedule = random_schedule(graph, rng, any_order=name in SMALL)
        moved = all_put_off(graph, schedule, rng)
        verify(graph, moved)
        # what a later run makes anew need not have been made before
        assert Counter(moved.steps) <= Counter(schedule.steps)
        assert simulate(graph, moved, costs).time_ms <= simulate(graph, schedule, costs).time_ms * (
            1 + 1e-12
        )


@pytest.mark.parametrize("name", ["chain", "batch-norm", "hf-resnet", "resnet50"])
def test_where_there_is_room_a_run_fits(name: str) -> None:
    """At each place that is offered for a budget, which is what the schedule takes."""
    graph, costs = small(name) if name in SMALL else graph_and_costs(fixed(name).planner)
    rng = random.Random(9)
    num_moved = 0
    for _ in range(30):
        schedule = random_schedule(graph, rng, any_order=False)
        simulation = simulate(graph, schedule, costs)
        readers = first_readers(graph, schedule)
        for op in deferrable_ops(graph):
            position = schedule.steps.index(op.index)
            for place in insertion_points(
                graph, costs, schedule, simulation, readers, position, simulation.peak_bytes
            ):
                assert position + 1 < place <= len(schedule.steps)
                moved = simulate(graph, defer(graph, schedule, position, place), costs)
                assert moved.peak_bytes <= simulation.peak_bytes
                num_moved += 1
    assert num_moved


def test_a_run_takes_its_results_and_its_workspace() -> None:
    graph, costs = small("chain")
    expected = [op.written_bytes + costs.first[op.index].overhead_bytes for op in graph.ops]
    assert result_and_workspace_bytes(graph, costs).tolist() == expected


def test_plans_near_the_smallest_peak_of_a_unet_are_faster_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its deepest convolutions have gradients larger than what they read."""
    model, image = UNet(num_levels=3, base_width=16, classes=4).train(), torch.zeros(2, 3, 32, 32)
    planner, without = (
        Planner(model, image, machine="cpu-avx2", numerics="bitwise") for _ in range(2)
    )
    shares = []
    for factor in (1.03, 1.1, 1.15):
        plan = planner.plan(int(factor * planner.minimum_peak_bytes))
        verify(plan.graph, plan.schedule)
        assert simulate(plan.graph, plan.schedule, plan.costs).peak_bytes <= plan.budget_bytes
        assert plan.predicted_ms >= plan.lower_bound_ms * (1 - 1e-9)
        with monkeypatch.context() as patch:
            patch.setattr("rockmate.planning.refine._MAX_FAILED_DEFERRALS", 0)
            shares.append(plan.predicted_ms / without.plan(plan.budget_bytes).predicted_ms)
    assert max(shares) <= 1
    assert min(shares) < 0.99


@pytest.mark.parametrize("name", ["gpt2", "hf-resnet"])
def test_gradients_that_are_put_off_are_eagers_bit_for_bit(name: str) -> None:
    case = fixed(name)
    plan = case.planner.plan(case.planner.minimum_peak_bytes)
    reference_model = case.eager()
    reference = train(reference_model, reference_model, workload_loss(case.workload), 1)[0]
    rng = random.Random(3)
    for base in (plan.schedule, baseline_schedule(plan.graph)):
        schedule = all_put_off(plan.graph, base, rng)
        assert schedule != base
        owner = case.workload.model
        owner.load_state_dict(case.before)
        owner.zero_grad(set_to_none=True)
        ours = replace(
            plan, schedule=schedule, simulation=simulate(plan.graph, schedule, plan.costs)
        )
        module = RockmateModule.of(owner, case.planner._step.planned_call(ours), trial="log")
        assert_same(train(module, owner, workload_loss(case.workload), 1)[0], reference)


def test_a_hook_fires_once_behind_a_gradient_that_is_put_off() -> None:
    torch.manual_seed(0)
    model, vectors = Shared(), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    reference(vectors).backward()
    planner = Planner(model, vectors, numerics="bitwise")
    plan = planner.plan(1.0)
    schedule = all_put_off(plan.graph, plan.schedule, random.Random(1))
    ours = replace(plan, schedule=schedule, simulation=simulate(plan.graph, schedule, plan.costs))
    module = RockmateModule.of(model, planner._step.planned_call(ours), trial="log")
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    module(vectors).backward()
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())
    assert not differing(gradients_of(model), gradients_of(reference))
