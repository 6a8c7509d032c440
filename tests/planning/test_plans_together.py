"""Plans for many budgets together fit, never take longer with more room, and are about as fast as
those made one by one."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import pytest
import torch
from models import Stack
from schedules import verify
from torch import nn

import rockmate
from bench import models
from rockmate import InvalidBudgetError, Plan, Planner
from rockmate.planning.candidate import linspace_int
from rockmate.schedule.simulate import simulate

NAMES = ("gpt2-12", "llama", "resnet50", "unet", "t5-small")
NUM_BUDGETS = 30
MACHINE = "cpu-avx2"
SWEPT = 20


@functools.cache
def planner_of(name: str) -> Planner:
    workload = models.build(name, tiny=True).with_loss_inside()
    return Planner(workload.model, workload.sample, machine=MACHINE, numerics="bitwise")


def budgets_of(planner: Planner) -> list[int]:
    return linspace_int(planner.minimum_peak_bytes, planner.baseline_peak_bytes, NUM_BUDGETS)


@functools.cache
def together(name: str) -> list[Plan]:
    planner = planner_of(name)
    return list(planner.plans(budgets_of(planner)).values())


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_fits_computes_the_step_and_takes_no_longer_with_more_room(name: str) -> None:
    planner = planner_of(name)
    assert [plan.budget_bytes for plan in together(name)] == budgets_of(planner)
    for plan in together(name):
        assert plan.captured is not None
        verify(plan.captured, plan.schedule)
        simulation = simulate(plan.captured, plan.schedule, plan.costs)
        assert simulation.peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
        assert plan.predicted_ms == pytest.approx(simulation.time_ms)
        assert plan.lower_bound_ms <= plan.predicted_ms * (1 + 1e-9)
    times_ms = [plan.predicted_ms for plan in together(name)]
    assert times_ms == sorted(times_ms, reverse=True)
    # The same ops in another order: the sum may round otherwise.
    assert times_ms[-1] == pytest.approx(planner_of(name).baseline_ms, rel=1e-14)
    assert times_ms[0] > times_ms[-1]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_about_as_fast_as_plans_made_one_by_one(name: str) -> None:
    planner = planner_of(name)
    other = Planner.of(planner._step, machine=MACHINE, numerics="bitwise")
    alone = [other.plan(budget_bytes) for budget_bytes in budgets_of(planner)]
    slower = [
        one.predicted_ratio - other.predicted_ratio
        for one, other in zip(together(name), alone, strict=True)
    ]
    assert statistics.mean(slower) <= 0.005
    assert statistics.median(slower) <= 0.001
    assert max(slower) <= 0.1


def test_more_room_takes_no_longer_than_a_budget_that_is_met_just_below_the_minimum() -> None:
    planner = Planner.of(planner_of("gpt2-12")._step, machine=MACHINE, numerics="bitwise")
    at_minimum = planner.plan(planner.minimum_peak_bytes)
    assert at_minimum.predicted_peak_bytes < planner.minimum_peak_bytes, "else nothing is met below"
    plans = planner.plans([at_minimum.predicted_peak_bytes, *budgets_of(planner)])
    times_ms = [plan.predicted_ms for plan in plans.values()]
    assert len(plans) == NUM_BUDGETS + 1
    assert times_ms[0] == at_minimum.predicted_ms
    assert times_ms == sorted(times_ms, reverse=True)


def test_one_alone_is_that_of_the_planner() -> None:
    planner = planner_of("unet")
    for budget in budgets_of(planner)[:3]:
        assert planner.plans([budget])[budget].schedule == planner.plan(budget).schedule


def test_no_budgets_and_none_that_fits_give_no_plans() -> None:
    planner = planner_of("unet")
    assert planner.plans([]) == {}
    assert planner.plans(range(1, 40), progress=True) == {}


@pytest.mark.parametrize("num_budgets", [3, 35])
def test_budgets_without_a_plan_are_left_out(num_budgets: int) -> None:
    planner = planner_of("unet")
    low, high = planner.minimum_peak_bytes // 2, planner.baseline_peak_bytes
    plans = planner.plans([1000, *linspace_int(low, high, num_budgets - 1)])
    assert 1000 not in plans
    assert low not in plans
    assert high in plans
    assert all(plan.predicted_peak_bytes <= budget for budget, plan in plans.items())


def test_shares_and_sizes_are_read_as_by_plan(capsys: pytest.CaptureFixture[str]) -> None:
    planner = planner_of("unet")
    plans = planner.plans([1.0, 0.9, "1TB"], progress=True)
    whole = planner.baseline_peak_bytes
    assert list(plans) == [int(0.9 * whole), whole, 10**12]
    assert "planning: 100%" in capsys.readouterr().err
    assert list(planner.plans("0.9:1.0:2")) == list(plans)[:2]
    with pytest.raises(InvalidBudgetError, match="12 parsecs"):
        planner.plans([1.0, "12 parsecs"])


def test_a_sweep_of_many_budgets_is_of_plans_made_together() -> None:
    model: nn.Module = Stack(3).train()
    sample = torch.randn(64, 16)
    planner = Planner(model, sample, machine=MACHINE)
    budgets = linspace_int(planner.minimum_peak_bytes, planner.baseline_peak_bytes, SWEPT)
    rows = rockmate.sweep(
        model, sample, budgets=budgets, strategies=("none", "rockmate"), machine=MACHINE
    )
    ours = [row for row in rows if row.strategy == "rockmate"]
    assert [row.strategy for row in rows] == ["none"] * SWEPT + ["rockmate"] * SWEPT
    assert [(row.budget_bytes, row.predicted_ms) for row in ours] == [
        (budget, plan.predicted_ms) for budget, plan in planner.plans(budgets).items()
    ]


def test_an_interrupt_while_one_after_the_other_is_planned_keeps_the_rows_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample = Stack(3).train(), torch.randn(64, 16)
    plan, asked = Planner.plan, list[object]()

    def interrupted_later(planner: Planner, budget: int, *, strategy: str = "rockmate") -> Plan:
        asked.append(budget)
        if len(asked) == 4:  # after that of nothing recomputed, and two rows
            raise KeyboardInterrupt
        return plan(planner, budget, strategy=strategy)

    monkeypatch.setattr(Planner, "plan", interrupted_later)
    with pytest.raises(KeyboardInterrupt):
        rockmate.sweep(
            model, sample, budgets="0.8:1.0:5", strategies=("rotor",), machine=MACHINE, out=tmp_path
        )
    assert len((tmp_path / "sweep.jsonl").read_text().splitlines()) == 2


def test_measured_rows_are_of_the_plans_made_together() -> None:
    model, sample = Stack(3).train(), torch.randn(64, 16)
    rows = rockmate.sweep(model, sample, budgets=f"0.6:1.0:{SWEPT}", measure=True, num_steps=1)
    assert all(row.is_measured and not row.broken_promise for row in rows)
    times = [row.predicted_ratio or 0.0 for row in rows]
    assert times == sorted(times, reverse=True)
