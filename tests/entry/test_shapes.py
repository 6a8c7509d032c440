"""Batches of other shapes than the sample's.

Smaller ones take over its schedule, larger ones are planned for or refused.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from fine_tuning import gpt2, llama
from helpers import assert_same, one_step, tensors_of
from torch import Tensor, nn

from bench import measure
from rockmate import Planner, RockmateModule, SignatureMismatchError, timeline
from rockmate.planning import checked_forms as planner_file
from rockmate.planning.strategies import Searches

LARGEST = (4, 48)
SMALLER = [(4, 31), (2, 48), (3, 7)]


def language_model(name: str, vocab_size: int = 512) -> nn.Module:
    sizes = {"vocab_size": vocab_size, "use_cache": False}
    if name == "gpt2":
        return gpt2(n_embd=64, n_head=4, n_positions=64, **sizes)
    sizes |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return llama(attention_dropout=0.0, **sizes)


def words(shape: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(3, 512, shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def step(module: nn.Module, owner: nn.Module, shape: tuple[int, int]) -> Any:
    def loss_of(callee: nn.Module, seed: int) -> tuple[list[Tensor], Tensor]:
        output = callee(**words(shape, seed))
        return tensors_of(dict(output)), output.loss

    owner.zero_grad(set_to_none=True)
    return one_step(module, owner, loss_of, seed=5)


@pytest.fixture
def no_more_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a smaller shape was measured and solved for")

    monkeypatch.setattr(planner_file, "measure_costs", refuse)
    monkeypatch.setattr(Searches, "search", refuse)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_smaller_shapes_take_over_the_schedule_and_equal_eager(
    name: str, request: pytest.FixtureRequest
) -> None:
    model = language_model(name)
    eager = copy.deepcopy(model)
    planner = Planner(model, words(LARGEST))
    middle = (planner.minimum_peak_bytes + planner.baseline_peak_bytes) // 2
    module = RockmateModule(model, words(LARGEST), middle)
    budget_bytes, schedule = module.plan.budget_bytes, module.plan.schedule
    assert schedule.num_recomputations() > 0
    request.getfixturevalue("no_more_planning")
    for shape in [LARGEST, *SMALLER, LARGEST]:
        assert_same(step(module, model, shape), step(eager, eager, shape))
        assert module.plan.schedule.forward == schedule.forward
        assert module.plan.schedule.backward == schedule.backward
        assert module.plan.budget_bytes == budget_bytes
        peak_bytes = measure.allocator_peak(
            lambda shape=shape: module(**words(shape)).loss.backward()
        )
        assert peak_bytes <= module.plan.predicted_peak_bytes <= budget_bytes


def test_checks_of_other_sizes_keep_the_budget() -> None:
    """Kernels are run alone on sizes that are new; none that takes more than the budget."""
    model = language_model("llama", vocab_size=4000)
    planner = Planner(model, words((4, 64)), differentiable="all")
    budget = int(0.6 * planner.baseline_peak_bytes)
    module = RockmateModule(model, words((4, 64)), budget, differentiable="all")
    assert module.plan.options.loss_chunks
    for length in (64, 64, 60, 59):
        given = words((4, length))
        if length == 60:
            model.zero_grad(set_to_none=False)
        peak_bytes = timeline(lambda given=given: module(**given).loss.backward()).peak_bytes
        assert length == 64 or peak_bytes <= budget


def test_any_other_shape_is_refused_without_replanning() -> None:
    module = RockmateModule(language_model("gpt2"), words((2, 40)), budget=0.8, replan=False)
    with pytest.raises(SignatureMismatchError, match=r"int64\[2, 39\]"):
        module(**words((2, 39)))


def test_each_plan_for_a_larger_batch_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    module = RockmateModule(model, torch.zeros(2, 8), 10**6, machine="cpu-avx2")
    with caplog.at_level(logging.INFO, logger="rockmate"):
        for num_rows in (3, 4, 5):
            module(torch.ones(num_rows, 8)).sum().backward()
    lines = [each for each in caplog.records if each.getMessage().startswith("planned for this")]
    assert [each.levelno for each in lines] == [logging.WARNING] * 3
