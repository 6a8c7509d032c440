"""A tensor hook on a parameter must see its whole gradient.

The plan counts it, and the step stays inside the budget.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_gradients_alike, same_gradients
from torch import Tensor, nn
from torch.nn import functional

from rockmate import InfeasibleBudgetError, Plan, Planner, RockmateModule
from rockmate._torch.allocator import timeline

ROWS, WIDTH = 8000, 160  # a head whose gradient would go in pieces


class LanguageModel(nn.Module):
    """Embedding, a wide layer, a head: tied to the embedding or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layer = nn.Sequential(nn.Linear(WIDTH, 640), nn.GELU(), nn.Linear(640, WIDTH))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        states = self.embed(words)
        return functional.cross_entropy(
            self.head(states + self.layer(states)).flatten(0, 1), words.flatten()
        )


def words(length: int = 40) -> Tensor:
    return torch.randint(ROWS, (2, length), generator=torch.Generator().manual_seed(length))


def language_model(*, tied: bool = False) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(tied=tied)


def peak_bytes(module: nn.Module, owner: nn.Module, batch: Tensor) -> int:
    module(batch).backward()  # makes .grad
    owner.zero_grad(set_to_none=False)
    return timeline(lambda: module(batch).backward()).peak_bytes


def rockmate_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("rockmate")]


@pytest.mark.parametrize(("tied", "which"), [(False, "head"), (True, "head"), (True, "all")])
def test_a_hooked_gradient_is_whole_and_inside_the_budget(tied: bool, which: str) -> None:
    model, reference = language_model(tied=tied), language_model(tied=tied)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    handles = []
    for place, owner in enumerate((model, reference)):
        for parameter in [owner.head.weight] if which == "head" else owner.parameters():
            hook = lambda gradient, place=place: (  # noqa: E731
                seen[place].append(gradient.clone()) or gradient.mul_(0.5)
            )
            handles.append(parameter.register_hook(hook))
    planner = Planner(model, words())
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(1000)
    # the first in chunks, where they help
    modules = [planner.module(budget) for budget in (caught.value.minimum_bytes, 1.0)]
    for module in modules:
        for owner, step in ((model, module), (reference, reference)):
            owner.zero_grad()
            for _ in range(2):
                step(words()).backward()
        assert_gradients_alike(model, reference, rtol=1e-5, atol=1e-7)
    num_hooked = 1 if which == "head" else len(list(model.parameters()))
    assert len(seen[0]) == len(seen[1]) == len(modules) * 2 * num_hooked
    assert sorted(tuple(gradient.shape) for gradient in seen[0]) == sorted(
        tuple(gradient.shape) for gradient in seen[1]
    )
    for handle in handles:  # which make copies
        handle.remove()
    for parameter in [model.head.weight] if which == "head" else model.parameters():
        parameter.register_hook(lambda gradient: None)
    for module in modules:
        assert peak_bytes(module, model, words()) <= module.plan.budget_bytes


def test_hooks_that_draw_from_one_generator_fire_in_eagers_order() -> None:
    layers = [nn.Conv1d(4, 32, 5), nn.BatchNorm1d(32), nn.ELU(), nn.Conv1d(32, 64, 5)]
    plain = nn.Sequential(*layers, nn.GroupNorm(4, 64), nn.ELU(), nn.Flatten(), nn.Linear(896, 6))
    model, x = copy.deepcopy(plain), torch.randn(8, 4, 22)
    for owner in (plain, model):
        draw = partial(torch.randn, generator=torch.Generator())
        for parameter in owner.parameters():
            parameter.register_hook(lambda gradient, draw=draw: gradient + draw(gradient.shape))
    module = RockmateModule(model, x, 0.6, numerics="bitwise", on_infeasible="least")
    same_gradients(module, plain, lambda each: each(x).square().mean().backward())


def test_a_hook_after_planning_is_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    model = language_model()
    module = RockmateModule(model, words(), 0.8)
    model.head.weight.register_hook(lambda gradient: None)
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        assert peak_bytes(module, model, words()) <= module.plan.budget_bytes
    assert ["head.weight has a tensor hook" in line for line in rockmate_lines(caplog)] == [True]
    # which takes over the schedule
    assert peak_bytes(module, model, words(21)) <= module.plan.budget_bytes
    assert module.plan.options.hooked == ("head.weight",)


def test_a_shorter_batch_adds_up_tied_gradients_and_has_a_plan() -> None:
    model, reference = language_model(tied=True), language_model(tied=True)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    for place, owner in enumerate((model, reference)):
        owner.head.weight.register_hook(
            lambda gradient, place=place: seen[place].append(gradient.clone()) or gradient.mul_(0.5)
        )
    module = RockmateModule(model, words(), 1.0)
    of_sample = module.plan
    for batch in (words(21), words(30), words(21)):
        for owner, step in ((model, module), (reference, reference)):
            owner.zero_grad()
            step(batch).backward()
        torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-7)
        assert_gradients_alike(model, reference, rtol=1e-5, atol=1e-7)
        # taken over, not planned anew
        assert module.plan.schedule.forward == of_sample.schedule.forward
        assert module.plan.predicted_peak_bytes < of_sample.predicted_peak_bytes
    assert len(seen[0]) == 3


def test_where_nothing_is_planned_anew_a_warning_names_the_parameter_and_the_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = language_model()
    reference = copy.deepcopy(model)
    module = Planner(model, words()).module(0.8)
    for owner in (model, reference):
        owner.head.weight.register_hook(lambda gradient: gradient * 2)
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        module(words()).backward()
        module(words())
    assert [
        f"{2 * 4 * ROWS * WIDTH:,} bytes" in line and "head.weight" in line
        for line in rockmate_lines(caplog)
    ] == [True]
    reference(words()).backward()
    torch.testing.assert_close(
        model.head.weight.grad, reference.head.weight.grad, rtol=1e-6, atol=1e-8
    )


def test_a_plan_with_a_hook_travels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = language_model(tied=True)
    handle = model.head.weight.register_hook(lambda gradient: None)
    Planner(model, words()).plan(1.0).save(tmp_path / "hooked.json")
    handle.remove()
    Planner(model, words()).plan(1.0).save(tmp_path / "plain.json")
    module = RockmateModule(model, words(), plan=Plan.load(tmp_path / "hooked.json"))
    model.head.weight.register_hook(lambda gradient: None)
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        assert peak_bytes(module, model, words()) <= module.plan.budget_bytes
    assert not rockmate_lines(caplog)
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        RockmateModule(model, words(), plan=Plan.load(tmp_path / "plain.json"))(words()).backward()
    assert ["beyond the budget" in line for line in rockmate_lines(caplog)] == [True]


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_gradients_fires_once_a_backward(mode: Any) -> None:
    model, reference = language_model(), language_model()
    seen: tuple[list[Any], list[Any]] = [], []
    module = RockmateModule(model, words(), 1.0, numerics="bitwise")
    for owner, found in ((model, seen[0]), (reference, seen[1])):
        weights = [owner.embed.weight, owner.head.weight]
        torch.autograd.graph.register_multi_grad_hook(weights, found.append, mode=mode)
    for _ in range(2):
        module(words()).backward()
        reference(words()).backward()
    assert len(seen[0]) == len(seen[1]) == 2
    for ours, eagers in zip(*seen, strict=True) if mode == "all" else ():
        torch.testing.assert_close(ours, eagers, rtol=0, atol=0)
    torch.testing.assert_close(model.embed.weight.grad, reference.embed.weight.grad, rtol=0, atol=0)
