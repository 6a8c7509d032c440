"""Several forwards before their backwards: planned within the budget, and measured to be."""

from __future__ import annotations

import copy
import logging
from collections import deque
from typing import Any

import models
import pytest
import torch
from helpers import assert_gradients_alike
from torch import nn

from bench.measure import allocator_peak
from rockmate import (
    InfeasibleBudgetError,
    Plan,
    PlanMismatchError,
    Planner,
    RockmateModule,
    SignatureMismatchError,
)


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


def test_what_counts_is_listed_at_the_peak() -> None:
    workload = models.tiny("gpt2")
    plan = Planner(workload.model, workload.sample, in_flight=3).plan(0.5)
    rows = plan.live_at_peak()
    assert sum(row.num_bytes for row in rows) == plan.predicted_peak_bytes
    others = [row for row in rows if "other forwards in flight" in row.description]
    assert [row.num_bytes for row in others] == [2 * plan.simulation.saved_bytes]
    assert "3 forwards" in plan.summary()


def test_a_plan_file_keeps_the_number() -> None:
    workload = models.tiny("gpt2")
    plan = Planner(workload.model, workload.sample, in_flight=3).plan(0.5)
    read = Plan.from_text(plan.to_text())
    assert read.simulation == plan.simulation
    assert read.snapshot.fingerprint == plan.snapshot.fingerprint
    assert RockmateModule(workload.model, workload.sample, plan=read).plan.options == plan.options
    with pytest.raises(PlanMismatchError, match="3 forwards in flight, and 1"):
        Planner(workload.model, workload.sample).module_of(read)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "in flight" in record.message]


class Deep(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))


PAIR = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1)).unbind()


def two_in_flight(module: nn.Module) -> None:
    one, other = map(module, PAIR)
    (one.square().mean() + other.square().mean()).backward()


def test_more_forwards_than_planned_are_refused_where_they_pass_the_budget() -> None:
    module = RockmateModule(Deep(), PAIR[0], 0.8, replan=False)
    with pytest.raises(SignatureMismatchError, match=r"2 forwards .* bounds 1\. Pass in_flight=2"):
        two_in_flight(module)
    two_in_flight(RockmateModule(Deep(), PAIR[0], 0.8, replan=False, in_flight=2))
    two_in_flight(RockmateModule(Deep(), PAIR[0], "1GiB", replan=False))


def test_more_forwards_than_planned_warn_once_with_least(caplog: pytest.LogCaptureFixture) -> None:
    module = RockmateModule(Deep(), PAIR[0], 0.8, on_infeasible="least", replan=False)
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        two_in_flight(module)
        two_in_flight(module)
    (line,) = lines(caplog)
    assert "2 forwards of this model are in flight" in line
    assert "in_flight=2" in line


def test_as_many_as_there_are_are_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    for budget in (0.8, "48KiB"):
        module = RockmateModule(Deep(), PAIR[0], budget)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="rockmate"):
            for _ in range(3):
                two_in_flight(module)
        (line,) = lines(caplog)
        assert "planned for this call, since 2 forwards of this model are in flight" in line
        assert module.plan.options.in_flight == 2
        peak_bytes = allocator_peak(lambda module=module: two_in_flight(module))
        assert peak_bytes <= module.plan.budget_bytes + (1 << 14)  # gradients of outputs


def test_forwards_that_cannot_be_planned_for_leave_the_plan_as_it_was() -> None:
    module = RockmateModule(Deep(), PAIR[0], Planner(Deep(), PAIR[0]).minimum_peak_bytes)
    plan = module.plan
    with pytest.raises(InfeasibleBudgetError):
        two_in_flight(module)
    assert module.plan is plan
    module(PAIR[0]).square().mean().backward()
    assert module.plan is plan


def test_auto_plans_for_as_many_forwards_as_there_are(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = Deep(), Deep()
    module = RockmateModule(model, None, "80KiB", mode="auto", numerics="bitwise")
    two_in_flight(plain)
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        two_in_flight(module)
    (line,) = lines(caplog)
    assert "planned for this call, since 2 forwards of this model are in flight" in line
    assert_gradients_alike(model, plain)
    assert module.plan.options.in_flight == 2
    two_in_flight(module)
    # the script's gradients of outputs
    assert allocator_peak(lambda: two_in_flight(module)) <= module.plan.budget_bytes + (1 << 14)


def test_auto_plans_where_a_first_step_in_frames_is_refused() -> None:
    """Frames run the first step of each kind of inputs that require gradients."""
    plain, module = Deep(), RockmateModule(Deep(), budget=0.6, mode="auto", numerics="bitwise")
    leaf = PAIR[0].clone().requires_grad_()
    for step in range(3):
        for each in (plain, module):
            each((leaf, 1 * leaf, PAIR[1])[step]).square().mean().backward()
        assert_gradients_alike(module, plain)
    assert module.frames is None
    assert module.is_planned


def test_smaller_calls_keep_the_number() -> None:
    workload = models.tiny("gpt2")
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
