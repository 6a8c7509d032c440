"""Ways to call a planned module.

Several at once, accumulation, inside other models, twice before a backward.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from helpers import (
    REGIMES,
    assert_same,
    assert_same_steps,
    budget_for,
    check_against_eager,
    differing,
    gradients_of,
    modules_of,
    one_step,
    planned,
    relative_error,
    same_bits,
    same_gradients,
    train,
    workload_loss,
    zero_gradients,
)
from torch import nn

from rockmate import Planner, RockmateModule


@pytest.mark.parametrize("last_first", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ["gpt2", "hf-resnet", "encoder"])
def test_two_forwards_before_the_backwards(name: str, regime: str, last_first: bool) -> None:
    case = planned(name)
    planner = Planner(case.workload.model, case.workload.sample, numerics="bitwise", in_flight=2)
    case = replace(case, planner=planner)
    found = []
    for callee, owner in (
        (eager := case.eager(), eager),
        (case.module(regime), case.workload.model),
    ):
        torch.manual_seed(1)
        losses = [case.workload.loss(callee, case.workload.make_batch(seed))[1] for seed in (1, 2)]
        gradients = []
        for loss in reversed(losses) if last_first else losses:
            owner.zero_grad()
            loss.backward()
            gradients.append(gradients_of(owner))
        found.append((losses, gradients, dict(owner.named_buffers()), torch.get_rng_state()))
    (losses, gradients, buffers, state), (our_losses, ours, our_buffers, our_state) = found
    assert all(torch.equal(a, b) for a, b in zip(losses, our_losses, strict=True))
    assert not any(differing(a, b) for a, b in zip(ours, gradients, strict=True))
    assert not differing(our_buffers, buffers)
    assert torch.equal(state, our_state)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_accumulate_over_micro_steps(name: str, regime: str, set_to_none: bool) -> None:
    case = planned(name)
    eager = case.eager()
    module, model = case.module(regime), case.workload.model
    found = []
    for callee, owner in ((eager, eager), (module, model)):
        one_step(callee, owner, workload_loss(case.workload), 7)
        owner.zero_grad(set_to_none=set_to_none)
        for seed in (1, 2):
            step = one_step(callee, owner, workload_loss(case.workload), seed)
        found.append(step.gradients)
    reference, ours = found
    assert ours.keys() == reference.keys()
    tied = {"lm_head.weight", "transformer.wte.weight"} if name == "gpt2" else set()
    different = set(differing(ours, reference))
    assert different <= tied, "the sum of a tied weight may be taken in another order, no other"
    assert all(relative_error(ours[key], reference[key]) <= 1e-6 for key in different)


def test_gradient_tensor_in_place_stays_the_same_tensor() -> None:
    case = planned("gpt2")
    module, model = case.module("binding"), case.workload.model
    zero_gradients(model)
    before = [parameter.grad.data_ptr() for parameter in model.parameters()]
    module(**case.workload.make_batch(1)).loss.backward()
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == before


def test_forwards_of_different_budgets_interleaved_on_one_model() -> None:
    model = models.Stack(dropout=0.0)
    x = torch.randn(64, 16)
    first, second, third = modules_of(model, x, in_flight=3)
    losses = [module(x).square().sum() for module in (first, second, third)]
    reference = copy.deepcopy(model)
    reference(x).square().sum().backward()
    for loss in (losses[1], losses[2], losses[0]):
        model.zero_grad()
        loss.backward()
        assert not differing(gradients_of(model), gradients_of(reference))


def test_planned_parts_inside_a_larger_model() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(8, 16), models.Stack(2), nn.LayerNorm(16), models.Stack(2), nn.Linear(16, 2)
        )

    def loss_of(module: nn.Module, step: int) -> tuple[None, torch.Tensor]:
        return None, module(x * step).square().mean()

    sample = torch.randn(64, 16, requires_grad=True)
    x = torch.randn(64, 8)
    eager = build()
    reference = train(eager, eager, loss_of)
    for regime in REGIMES:
        outer = build()
        for index in (1, 3):
            planner = Planner(outer[index], sample)
            outer[index] = planner.module(budget_for(planner, regime))
        assert_same_steps(train(outer, outer, loss_of), reference)


def test_one_planned_part_used_twice_in_a_larger_model() -> None:
    sample = torch.randn(64, 16, requires_grad=True)
    model = models.Stack(2)

    def loss_of(module: nn.Module, step: int) -> tuple[None, torch.Tensor]:
        x = torch.full((64, 16), 0.1 * step, requires_grad=True)
        return None, module(module(x) * 2).square().mean()

    reference_model = copy.deepcopy(model)
    reference = one_step(reference_model, reference_model, loss_of, 1)
    for module in modules_of(model, sample, in_flight=2):
        model.zero_grad()
        ours = one_step(module, model, loss_of, 1)
        assert_same(ours, reference)


def test_same_tensor_for_two_inputs_in_the_sample_and_two_later() -> None:
    workload = models.tiny("llama")
    words = workload.make_batch(1)["input_ids"]
    module = RockmateModule(workload.model, {"input_ids": words, "labels": words}, 0.7)
    other = {"input_ids": words, "labels": words.flip(0)}
    assert same_bits(module(**other).loss, workload.model(**other).loss)
    assert same_bits(
        module(input_ids=words, labels=words).loss,
        workload.model(input_ids=words, labels=words).loss,
    )


def test_output_changed_in_place_by_the_caller() -> None:
    x = torch.randn(64, 16)

    def loss_of(module: nn.Module, step: int) -> tuple[None, torch.Tensor]:
        y = module(x * step)
        y.mul_(2)
        y += 1
        return None, y.square().sum()

    check_against_eager(models.Stack(), x, loss_of)


@pytest.mark.parametrize("delay_s", [0.0, 1e9])
def test_a_start_that_takes_long_shows_its_stages(
    delay_s: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rockmate._util.is_terminal", lambda: True)
    monkeypatch.setattr("rockmate._util.STAGE_DELAY_S", delay_s)
    RockmateModule(models.Stack(1).train(), torch.randn(8, 16), 1.0)
    shown = capsys.readouterr().err
    for stage in ("capturing the model", "measuring ops", "planning"):
        assert (stage in shown) is (delay_s == 0)


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    case = planned("gpt2")
    batch = case.workload.make_batch(1)

    def two_backwards(callee: Any) -> None:
        loss = callee(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()

    same_gradients(case.module("minimum"), case.eager(), two_backwards)
