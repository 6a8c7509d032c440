"""A search ends near the bound or when its time is over, and the plan says which."""

from __future__ import annotations

import logging
from math import nan
from typing import Any

import pytest
import torch
from small_graphs import fixed, no_clock

import rockmate.planning.checked_forms
from bench import models
from rockmate import Plan, Planner
from rockmate.cli.main import main
from rockmate.planning.search_problem import StoppingRule


def planner_of(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Planner:
    monkeypatch.setattr(rockmate.planning.checked_forms, "measure_costs", no_clock)
    workload = models.build(name, tiny=True)
    return Planner(workload.model, workload.sample, **options)


@pytest.mark.parametrize("name", ["gap_tolerance", "time_limit_s"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0.0, ValueError), (-1, ValueError), (nan, ValueError), ("5", TypeError), (True, TypeError),
     (None, TypeError)],
)  # fmt: skip
def test_bad_values_are_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name} is .*above 0"):
        Planner(torch.nn.Linear(2, 2), torch.ones(2, 2), **{name: value})


def test_no_model_is_captured_for_a_bad_value() -> None:
    with pytest.raises(ValueError, match="gap_tolerance"):
        Planner(None, None, gap_tolerance=0.0)  # pyright: ignore[reportArgumentType]


def test_the_status_is_what_the_bound_proves() -> None:
    planner = fixed("gpt2").planner
    low, high = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    found = set()
    for eighth in range(9):
        plan = planner.plan(low + (high - low) * eighth // 8)
        gap = (plan.predicted_ms - planner.lower_bound_ms(plan.budget_bytes)) / plan.baseline_ms
        found.add(plan.status)
        if plan.status == "optimal":
            assert gap <= 1e-9
        if plan.status == "within_gap":
            assert gap <= 1e-3
        assert plan.status != "time_limit"
        assert Plan.from_text(plan.to_text()).status in (plan.status, "within_gap", "optimal")
    assert planner.plan(high).status == "optimal"
    assert len(found) > 1


def test_a_wide_tolerance_ends_the_search_early(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gpt2-2layer"
    exact, rough = (planner_of(name, monkeypatch, gap_tolerance=gap) for gap in (1e-3, 0.5))
    budget = exact.minimum_peak_bytes * 11 // 10
    one, other = exact.plan(budget), rough.plan(budget)
    assert other.predicted_peak_bytes <= budget
    assert other.status == "within_gap"
    assert other.predicted_ms - other.lower_bound_ms <= 0.5 * other.baseline_ms
    stages = [len(planner._forms.captured.local_search._trace(budget).steps)
              for planner in (exact, rough)]  # fmt: skip
    assert stages[1] < stages[0] / 3
    assert one.predicted_ms <= other.predicted_ms


def test_a_limit_too_short_for_any_search_gives_a_plan_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of("gpt2-2layer", monkeypatch, time_limit_s=1e-9)
    longer = planner_of("gpt2-2layer", monkeypatch)
    assert planner.minimum_peak_bytes == longer.minimum_peak_bytes
    for factor in (1.0, 1.1, 1.4):
        plan = planner.plan(int(factor * planner.minimum_peak_bytes))
        assert plan.predicted_peak_bytes <= plan.budget_bytes
        assert plan.status == "time_limit"
        assert "ended by time_limit_s" in plan.summary()
        assert Plan.from_text(plan.to_text()).is_cut_short
        best = longer.plan(plan.budget_bytes)
        assert best.status != "time_limit"
        assert best.predicted_ms < plan.predicted_ms
    assert planner.plan(1.0).status == "optimal"


def test_numbers_of_a_plan_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = models.build("llama-2layer", tiny=True)
    planner = Planner(workload.model, workload.sample, time_limit_s=1e-9)
    module = planner.module(int(1.1 * planner.minimum_peak_bytes))
    assert module.plan.schedule.num_recomputations()
    loss = module(**workload.sample).loss
    assert torch.equal(loss, workload.model(**workload.sample).loss)


def test_each_improving_schedule_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planner = planner_of("gpt2-2layer", monkeypatch)
    budget = planner.minimum_peak_bytes * 11 // 10
    with caplog.at_level(logging.DEBUG, logger="rockmate.planning.search_trace"):
        plan = planner.plan(budget)
    records = [record for record in caplog.records if record.name.endswith("search_trace")]
    lines = [record.getMessage() for record in records if record.levelno == logging.INFO]
    ratios = [float(line.partition(" s: ")[2].partition("x")[0]) for line in lines]
    assert len(lines) >= 2
    assert ratios == sorted(ratios, reverse=True)
    assert f"{plan.predicted_ratio:.4f}x" in lines[-1]
    assert len(records) > len(lines)  # stages that gain nothing are for DEBUG


def test_a_long_search_shows_its_gap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rockmate.planning.search_trace._BAR_DELAY_S", 0.0)
    for progress in (False, True):
        planner = planner_of("gpt2-2layer", monkeypatch, progress=progress)
        capsys.readouterr()
        plan = planner.plan(planner.minimum_peak_bytes * 11 // 10)
        shown = capsys.readouterr().err
        assert ("gap" in shown) == progress
    assert f"{plan.predicted_ratio:.4f}x" in shown


def test_the_clock_of_several_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rockmate.planning.search_problem.monotonic", lambda: now[0])
    rule = StoppingRule(1e-2, 10.0)
    assert not rule.is_late
    rule.begin()
    now[0] = 9.9
    assert not rule.is_late
    now[0] = 10.0
    assert rule.is_late
    rule.begin(3)
    now[0] = 39.0
    assert not rule.is_late
    now[0] = 40.0
    assert rule.is_late


@pytest.mark.parametrize("option", ["--gap-tolerance", "--time-limit"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "much"])
def test_bad_values_on_the_command_line(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "package.module:function", "--budget", "0.5", f"{option}={value}"])
    assert option in capsys.readouterr().err
