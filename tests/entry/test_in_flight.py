"""Several forwards before their backwards: planned within the budget, and measured to be."""

from __future__ import annotations

import copy
import logging
from collections import deque
from typing import Any

import models
import pytest
import torch
from torch import nn

from bench.measure import allocator_peak
from rockmate import Plan, PlanMismatchError, Planner, RockmateModule


def pipeline(module: nn.Module, batches: list[Any], in_flight: int, loss_of: Any) -> None:
    """One forward, one backward (1F1B): so many forwards, then a backward before each further one.

    The first forward's backward comes first.
    """
    waiting: deque[torch.Tensor] = deque()
    for batch in batches:
        if len(waiting) == in_flight:
            waiting.popleft().backward()
        waiting.append(loss_of(module, batch)[1])
    while waiting:
        waiting.popleft().backward()


@pytest.mark.parametrize("name", ["gpt2", "hf-resnet"])
@pytest.mark.parametrize("in_flight", [2, 4])
def test_the_measured_peak_of_a_pipeline_is_the_predicted_one(name: str, in_flight: int) -> None:
    workload = models.tiny(name)
    planner = Planner(workload.model, workload.sample, in_flight=in_flight)
    batches = [workload.make_batch(step) for step in range(in_flight + 2)]
    middle = (planner.minimum_peak_bytes + planner.baseline_peak_bytes) // 2
    for budget in (middle, planner.minimum_peak_bytes):
        module = planner.module(budget)

        def step(module: nn.Module = module) -> None:
            pipeline(module, batches, in_flight, workload.loss)

        step()  # so that `.grad` is there
        measured = allocator_peak(step)
        assert measured <= module.plan.predicted_peak_bytes <= module.plan.budget_bytes
        assert measured > 0.8 * module.plan.predicted_peak_bytes


def test_gradients_of_a_pipeline_are_eagers() -> None:
    workload = models.tiny("gpt2")
    reference = copy.deepcopy(workload.model)
    batches = [workload.make_batch(step) for step in range(5)]
    module = RockmateModule(workload.model, workload.sample, 0.3, in_flight=3)
    for each in (module, reference):
        torch.manual_seed(0)
        pipeline(each, batches, 3, workload.loss)
    # Tied weights are added up in another order over several backwards.
    largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    for ours, theirs in zip(workload.model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert (ours.grad - theirs.grad).abs().max().item() <= 1e-6 * largest


def test_a_plan_for_one_forward_would_not_have_fitted() -> None:
    workload = models.tiny("gpt2")
    single = Planner(workload.model, workload.sample)
    several = Planner(workload.model, workload.sample, in_flight=3)
    assert several.baseline_peak_bytes > 2 * single.baseline_peak_bytes
    budget = (several.minimum_peak_bytes + several.baseline_peak_bytes) // 3
    batches = [workload.make_batch(step) for step in range(3)]
    peaks = {}
    for planner in (single, several):
        module = planner.module(min(budget, planner.baseline_peak_bytes))
        pipeline(module, batches, 3, workload.loss)
        peaks[planner] = allocator_peak(
            lambda module=module: pipeline(module, batches, 3, workload.loss)
        )
    assert peaks[several] <= budget < peaks[single]


def test_what_counts_is_listed_at_the_peak() -> None:
    workload = models.tiny("mlp")
    plan = Planner(workload.model, workload.sample, in_flight=3).plan(0.5)
    rows = plan.live_at_peak()
    assert sum(row.num_bytes for row in rows) == plan.predicted_peak_bytes
    others = [row for row in rows if "other forwards in flight" in row.description]
    assert [row.num_bytes for row in others] == [2 * plan.simulation.saved_bytes]
    assert "3 forwards" in plan.summary()


def test_a_plan_file_keeps_the_number() -> None:
    workload = models.tiny("mlp")
    plan = Planner(workload.model, workload.sample, in_flight=3).plan(0.5)
    read = Plan.from_text(plan.to_text())
    assert read.simulation == plan.simulation
    assert read.snapshot.fingerprint == plan.snapshot.fingerprint
    assert RockmateModule(workload.model, workload.sample, plan=read).plan.options == plan.options
    with pytest.raises(PlanMismatchError, match="3 forwards in flight, and 1"):
        Planner(workload.model, workload.sample).module_of(read)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "in flight" in record.message]


def test_more_forwards_than_planned_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    workload = models.tiny("mlp")
    module = RockmateModule(workload.model, workload.sample, 0.5, in_flight=2)
    batch = workload.make_batch(0)
    with caplog.at_level(logging.WARNING, logger="rockmate.runtime"):
        pipeline(module, [batch] * 4, 2, workload.loss)
        assert not lines(caplog)
        pipeline(module, [batch] * 4, 4, workload.loss)
    (line,) = lines(caplog)
    assert "3 forwards of this model are in flight" in line
    assert "bounds 2" in line
    assert "in_flight=3" in line


def test_smaller_calls_keep_the_number() -> None:
    workload = models.tiny("mlp")
    module = RockmateModule(workload.model, workload.sample, 0.5, in_flight=3)
    budget = module.plan.budget_bytes
    rows = {key: value[:1] for key, value in workload.make_batch(0).items()}
    for _ in range(2):
        pipeline(module, [rows] * 3, 3, workload.loss)
    assert module.plan.options.in_flight == 3
    assert allocator_peak(lambda: pipeline(module, [rows] * 3, 3, workload.loss)) <= budget


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "two"])
def test_numbers_that_are_none(given: Any) -> None:
    with pytest.raises(ValueError, match="in_flight is"):
        Planner(nn.Linear(4, 1), torch.randn(2, 4), in_flight=given)


def test_the_staged_program_says_that_it_plans_one_forward() -> None:
    planner = Planner(nn.Sequential(nn.Linear(4, 1)), torch.randn(2, 4), in_flight=2)
    with pytest.raises(ValueError, match="in_flight is 2"):
        planner.plan(1.0, strategy="checkmate")
