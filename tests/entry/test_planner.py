"""One capture serves every budget, and more of it never costs time.

The same input gives the same plan.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import models
import pytest
import torch
from helpers import REGIMES, budget_for, planned
from schedules import verify
from stopwatch import least_seconds

import rockmate.planning.checked_forms
import rockmate.planning.session
import rockmate.planning.strategies
from rockmate import Plan, Planner, RockmateModule
from rockmate.costs.cost import Cost, Costs
from rockmate.schedule.schedule import Schedule

NAMES = ("gpt2", "t5-small", "hf-resnet", "mlp")


def fixed_costs(graph: Any, **_: Any) -> Costs:
    """A cost for each op from its bytes alone: the same in every run."""
    costs = tuple(
        Cost(
            time_ms=1e-3
            + (op.written_bytes + sum(storage.num_bytes for storage in op.reads)) / 1e6,
            overhead_bytes=op.written_bytes // 3,
        )
        for op in graph.ops
    )
    return Costs(first=costs, recompute=costs, num_distinct=len(costs))


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rockmate.planning.checked_forms, "measure_costs", fixed_costs)


def budgets_of(planner: Planner, number: int = 9) -> list[int]:
    low, high = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    return [low + (high - low) * index // (number - 1) for index in range(number)]


@pytest.mark.parametrize("name", NAMES)
def test_more_budget_never_costs_time_in_whatever_order_it_is_asked_for(
    name: str, fixed: None
) -> None:
    workload = models.tiny(name)
    planner = Planner(workload.model, workload.sample)
    budgets = budgets_of(planner, 13)
    asked = random.Random(3).sample(budgets, len(budgets))
    plans = {budget: planner.plan(budget) for budget in asked}
    times = [plans[budget].predicted_ms for budget in budgets]
    assert times == sorted(times, reverse=True)
    assert times[-1] == planner.baseline_ms
    assert all(plans[budget].predicted_peak_bytes <= budget for budget in budgets)


@pytest.mark.parametrize("name", NAMES)
def test_same_input_gives_the_same_plan(name: str, fixed: None) -> None:
    planners = [Planner((workload := models.tiny(name)).model, workload.sample) for _ in range(3)]
    planners[1].frontier()
    budgets = budgets_of(planners[0], 5)
    found = [{b: planners[0].plan(b) for b in budgets}, {b: planners[1].plan(b) for b in budgets}]
    found.append({b: planners[2].plan(b) for b in reversed(budgets)})
    assert planners[0].minimum_peak_bytes == planners[1].minimum_peak_bytes
    for budget in budgets:
        texts = [plans[budget].schedule.rows(plans[budget].snapshot.names) for plans in found]
        assert texts[0] == texts[1], "the frontier, asked for before, changes a plan"
        assert texts[0] == texts[2], "budgets asked for before change a plan"
        assert len({plans[budget].predicted_ms for plans in found}) == 1


def test_further_budgets_cost_no_capture_no_measurement_and_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = planned("t5-small")

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("captured or measured again")

    for module, name in (
        (rockmate.planning.session, "captured_step"),
        (rockmate.planning.checked_forms, "measure_costs"),
        (rockmate.planning.strategies, "partition"),
    ):
        monkeypatch.setattr(module, name, never)
    for budget in budgets_of(case.planner, 7):
        # a budget asked for before costs nothing
        runs = [partial(case.planner.plan, budget + more) for more in (64, 128, 192)]
        assert least_seconds(*runs) < 2.0
        assert isinstance(case.planner.module(budget), RockmateModule)


@pytest.mark.parametrize("name", models.TINY)
def test_plan_says_what_it_promises(name: str) -> None:
    case = planned(name)
    for regime in REGIMES:
        plan = case.planner.plan(budget_for(case.planner, regime))
        assert isinstance(plan, Plan)
        assert 0 < plan.predicted_peak_bytes <= plan.budget_bytes
        assert plan.baseline_peak_bytes == case.planner.baseline_peak_bytes
        assert plan.baseline_ms == case.planner.baseline_ms > 0
        assert plan.predicted_ms >= plan.baseline_ms * (1 - 1e-9)
        text = plan.summary()
        assert len(text.splitlines()) >= 4
        for word in ("budget", "peak", "time", "KiB", "ms"):
            assert word in text
        assert f"{plan.predicted_peak_bytes / 2**10:,.1f} KiB" in text
    assert case.planner.plan(1.0).schedule.num_recomputations() == 0


def test_a_broken_schedule_does_not_verify() -> None:
    plan = planned("gpt2").planner.plan(planned("gpt2").planner.minimum_peak_bytes)
    forward, backward = plan.schedule.forward, plan.schedule.backward
    for broken in (
        Schedule(forward[1:], backward),
        Schedule(forward, backward[:-1]),
        Schedule(forward, tuple(reversed(backward))),
        Schedule((), backward),
        Schedule(forward, ()),
        Schedule(forward + backward, ()),
    ):
        with pytest.raises(AssertionError):
            verify(plan.graph, broken)


def test_time_limit_of_the_solver_is_accepted_and_timings_are_kept() -> None:
    planner = Planner(models.Stack(), torch.randn(64, 16), time_limit_s=5.0)
    assert set(planner.timings) >= {"capture", "costs", "solve"}
    assert all(seconds >= 0 for seconds in planner.timings.values())


def test_progress_changes_no_plan(fixed: None, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = models.Stack(), torch.randn(64, 16)
    quiet, loud = Planner(model, x), Planner(model, x, progress=True)
    for budget in budgets_of(quiet, 5):
        assert quiet.plan(budget).schedule == loud.plan(budget).schedule
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (torch.nn.Linear(3, 2), (4, 3)),
        (torch.nn.Sequential(torch.nn.Linear(3, 3)), (1, 3)),
        (torch.nn.Bilinear(3, 3, 2), None),
    ],
)
def test_smallest_models(model: torch.nn.Module, shape: tuple[int, ...] | None) -> None:
    sample = (torch.randn(5, 3), torch.randn(5, 3)) if shape is None else torch.randn(shape)
    planner = Planner(model, sample)
    for regime in REGIMES:
        module = planner.module(budget_for(planner, regime))
        output = module(*sample) if shape is None else module(sample)
        output.sum().backward()
    assert planner.frontier()
