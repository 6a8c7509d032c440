"""Plans for many budgets together fit, never take longer with more room, and are about as fast as those made one by one."""

from __future__ import annotations

import functools
import statistics

import pytest
import torch
from models import Stack
from torch import nn

import rockmate
from bench import models
from rockmate import InvalidBudgetError, Plan, Planner
from rockmate.candidate import evenly
from rockmate.planner import _MANY
from rockmate.simulate import simulate

NAMES = ("gpt2-12", "llama", "resnet50", "unet", "t5-small")
NUM_BUDGETS = 30
MACHINE = "cpu-avx2"


@functools.cache
def planner_of(name: str) -> Planner:
    workload = models.build(name, tiny=True).with_loss_inside()
    return Planner(workload.model, workload.sample, machine=MACHINE, allow_chunking=False)


def budgets_of(planner: Planner) -> list[int]:
    return evenly(planner.minimum_peak_bytes, planner.baseline_peak_bytes, NUM_BUDGETS)


@functools.cache
def together(name: str) -> list[Plan]:
    planner = planner_of(name)
    return list(planner.plans(budgets_of(planner)).values())


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_fits_and_computes_the_step(name: str) -> None:
    planner = planner_of(name)
    assert [plan.budget_bytes for plan in together(name)] == budgets_of(planner)
    for plan in together(name):
        assert plan.captured is not None
        plan.schedule.verify(plan.captured)
        simulation = simulate(plan.captured, plan.schedule, plan.costs)
        assert simulation.peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
        assert plan.predicted_ms == pytest.approx(simulation.time_ms)
        assert plan.lower_bound_ms <= plan.predicted_ms * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_more_room_never_takes_longer(name: str) -> None:
    times_ms = [plan.predicted_ms for plan in together(name)]
    assert times_ms == sorted(times_ms, reverse=True)
    assert times_ms[-1] == planner_of(name).baseline_ms
    assert times_ms[0] > times_ms[-1]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_about_as_fast_as_plans_made_one_by_one(name: str) -> None:
    planner = planner_of(name)
    alone = [planner.plan(budget_bytes) for budget_bytes in budgets_of(planner)]
    slower = [one.predicted_ratio - other.predicted_ratio for one, other in zip(together(name), alone, strict=True)]
    assert statistics.mean(slower) <= 0.01
    assert statistics.median(slower) <= 0.0025


def test_the_order_of_budgets_does_not_matter_nor_what_was_planned_before() -> None:
    planner = planner_of("unet")
    again = Planner.of(planner._step, machine=MACHINE, allow_chunking=False)
    budgets = budgets_of(planner)
    plans = again.plans([*budgets[::2], *budgets[::-1]])
    assert list(plans) == budgets
    assert [plan.schedule for plan in plans.values()] == [plan.schedule for plan in together("unet")]
    assert planner.plan(budgets[3]).schedule == again.plan(budgets[3]).schedule


def test_a_few_are_those_of_the_planner_one_by_one() -> None:
    planner = planner_of("unet")
    budgets = budgets_of(planner)[: _MANY - 1]
    assert [plan.schedule for plan in planner.plans(budgets).values()] == [planner.plan(budget).schedule for budget in budgets]


@pytest.mark.parametrize("num_budgets", [_MANY - 1, _MANY + 5])
def test_budgets_without_a_plan_are_left_out(num_budgets: int) -> None:
    planner = planner_of("llama")
    low, high = planner.minimum_peak_bytes // 2, planner.baseline_peak_bytes
    plans = planner.plans([1000, *evenly(low, high, num_budgets - 1)])
    assert 1000 not in plans
    assert low not in plans
    assert high in plans
    assert all(plan.predicted_peak_bytes <= budget for budget, plan in plans.items())


def test_shares_and_sizes_are_read_as_by_plan(capsys: pytest.CaptureFixture[str]) -> None:
    planner = planner_of("unet")
    plans = planner.plans([1.0, 0.9, "1TB"], progress=True)
    assert list(plans) == [int(0.9 * planner.baseline_peak_bytes), planner.baseline_peak_bytes, 10**12]
    assert "planning: 100%" in capsys.readouterr().err
    with pytest.raises(InvalidBudgetError, match="12 parsecs"):
        planner.plans([1.0, "12 parsecs"])


def test_a_sweep_of_many_budgets_is_of_plans_made_together() -> None:
    model: nn.Module = Stack(3).train()
    sample = torch.randn(64, 16)
    planner = Planner(model, sample, machine=MACHINE)
    budgets = evenly(planner.minimum_peak_bytes, planner.baseline_peak_bytes, _MANY)
    rows = rockmate.sweep(model, sample, budgets=budgets, strategies=("none", "rockmate"), machine=MACHINE)
    ours = [row for row in rows if row.strategy == "rockmate"]
    assert [row.strategy for row in rows] == ["none"] * _MANY + ["rockmate"] * _MANY
    assert [(row.budget_bytes, row.predicted_ms) for row in ours] == [
        (budget, plan.predicted_ms) for budget, plan in planner.plans(budgets).items()
    ]
