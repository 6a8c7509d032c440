"""More memory never takes longer, chunks included where they are allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layered import layered
from schedules import verify
from small_graphs import fixed

from rockmate.graph.chunking.chunks import Chunks
from rockmate.plan.plan import Plan
from rockmate.planning.candidate import linspace_int
from rockmate.planning.session import never_slower
from rockmate.schedule.simulate import simulate


def test_with_chunks_allowed_the_curve_falls() -> None:
    planner = layered()
    budgets = linspace_int(planner.minimum_peak_bytes, planner.baseline_peak_bytes, 9)
    plans = planner.plans(budgets)
    assert list(plans) == budgets
    times_ms = [plan.predicted_ms for plan in plans.values()]
    assert times_ms == sorted(times_ms, reverse=True)
    chunked = [plan.options.loss_chunks for plan in plans.values()]
    assert any(chunked)
    for budget_bytes, plan in plans.items():
        assert plan.budget_bytes == budget_bytes
        graph = plan.graph
        verify(graph, plan.schedule)
        assert simulate(graph, plan.schedule, plan.costs).peak_bytes <= budget_bytes
        assert planner.plan(budget_bytes) is plan


def few_plans() -> tuple[list[int], list[Plan]]:
    planner = fixed("gpt2").planner
    low, high = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    plans = [planner.plan(budget_bytes) for budget_bytes in linspace_int(low, high, 9)]
    distinct = sorted({plan.predicted_ms: plan for plan in plans}.items(), reverse=True)
    chosen = [plan for _, plan in distinct[:4]]
    return sorted(plan.budget_bytes for plan in chosen), chosen


def test_a_faster_plan_is_handed_on() -> None:
    budgets, (slowest, slow, fast, fastest) = few_plans()
    assert slowest.predicted_ms > slow.predicted_ms > fast.predicted_ms > fastest.predicted_ms
    given = {
        budget: replace(plan, budget_bytes=budget)
        for budget, plan in zip(budgets, (slow, slowest, fastest, fast), strict=True)
    }
    found = never_slower(given)
    assert [plan.schedule for plan in found.values()] == [
        plan.schedule for plan in (slow, slow, fastest, fastest)
    ]
    assert [plan.budget_bytes for plan in found.values()] == budgets
    assert callable(slowest.bound)
    assert found[budgets[1]].lower_bound_ms == slowest.bound(budgets[1])
    chunked = replace(fastest, options=replace(fastest.options, loss_chunks=Chunks(4, "recompute")))
    found = never_slower(dict(zip(budgets[:2], (chunked, slow), strict=True)))
    assert found[budgets[1]].schedule == chunked.schedule


def test_budgets_asked_for_one_by_one_hand_faster_plans_on(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = layered(numerics="bitwise")
    low, high = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    middle = (low + high) // 2
    first = planner.plan(middle)
    slow = planner._forms.best_within(low, "rockmate")
    monkeypatch.setattr(planner._forms, "best_within", lambda *_: slow)
    found = planner.plan(high)
    assert slow is not None
    assert slow.time_ms > first.predicted_ms
    assert found.schedule == first.schedule
    assert found.budget_bytes == high
    assert planner.plan(high) is found
