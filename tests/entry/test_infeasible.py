"""Budgets that no schedule fits: an error, or the smallest peak."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import differing, gradients_of
from torch import nn

from rockmate import InfeasibleBudgetError, Planner, RockmateModule
from rockmate.budget import size_text


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())


def test_the_smallest_peak_is_taken_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, x = make_model(), torch.randn(64, 32)
    eager = copy.deepcopy(model)
    with pytest.raises(InfeasibleBudgetError) as caught:
        RockmateModule(model, x, 1000, machine="cpu-avx2", numerics="bitwise")
    caplog.clear()
    module = RockmateModule(
        model, x, 1000, on_infeasible="least", machine="cpu-avx2", numerics="bitwise"
    )
    assert module.plan.budget_bytes == caught.value.minimum_bytes
    (record,) = [each for each in caplog.records if each.name == "rockmate.planning.session"]
    plan = module.plan
    for size_bytes in (1000, plan.budget_bytes, plan.baseline_peak_bytes):
        assert size_text(size_bytes) in record.message
    module(x).sum().backward()
    eager(x).sum().backward()
    assert not differing(gradients_of(model), gradients_of(eager))


def test_a_larger_batch_goes_on_with_its_smallest_peak() -> None:
    model, small, large = make_model(), torch.randn(8, 32), torch.randn(512, 32)
    eager = copy.deepcopy(model)
    strict = RockmateModule(
        copy.deepcopy(model), small, 1.0, machine="cpu-avx2", numerics="bitwise"
    )
    with pytest.raises(InfeasibleBudgetError, match="Give the largest batch as the sample"):
        strict(large)
    options = {"on_infeasible": "least", "machine": "cpu-avx2", "numerics": "bitwise"}
    module = RockmateModule(model, small, 1.0, **options)
    budget_bytes = module.plan.budget_bytes
    for batch in (small, large, small):
        module(batch).sum().backward()
        eager(batch).sum().backward()
    assert module.plan.budget_bytes == budget_bytes, "the small batch has its plan again"
    assert not differing(gradients_of(model), gradients_of(eager))


def test_other_shapes_keep_the_budget_that_was_asked_for() -> None:
    """A larger batch that took more bytes does not raise the budget of the next."""
    small, large, other = torch.randn(8, 4, 32), torch.randn(256, 4, 32), torch.randn(2, 16, 32)
    options = {"on_infeasible": "least", "machine": "cpu-avx2", "numerics": "bitwise"}
    module = RockmateModule(make_model(), small, 1.0, **options)
    budget_bytes = module.plan.budget_bytes
    module(large)
    assert module.plan.budget_bytes > budget_bytes
    module(small)
    module(other)
    assert module.plan.budget_bytes == budget_bytes


def test_a_planner_takes_the_smallest_peak() -> None:
    model, x = make_model(), torch.randn(64, 32)
    planner = Planner(model, x, machine="cpu-avx2", numerics="bitwise")
    with pytest.raises(InfeasibleBudgetError, match='on_infeasible="least"') as caught:
        planner.plan(1000)
    assert planner.plan(1000, on_infeasible="least").budget_bytes == caught.value.minimum_bytes
    module = planner.module("1kB", on_infeasible="least")
    assert module.plan.predicted_peak_bytes <= caught.value.minimum_bytes
    assert planner.plan(1.0, on_infeasible="least").budget_bytes == planner.baseline_peak_bytes


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match="choose 'error' or 'least'"):
        RockmateModule(make_model(), torch.randn(8, 32), 0.5, on_infeasible="smallest")
    planner = Planner(make_model(), torch.randn(8, 32), machine="cpu-avx2")
    with pytest.raises(ValueError, match="choose 'error' or 'least'"):
        planner.plan(0.5, on_infeasible="smallest")
