"""What users of recomputation trip over elsewhere, one test each, with a planned module under plain
PyTorch and Hugging Face."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from fine_tuning import LENGTH, VOCABULARY, batch, gpt2, llama
from helpers import differing, same_bits, same_gradients
from torch import nn

from rockmate import InfeasibleBudgetError, Planner, RockmateModule

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def rockmate_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("rockmate")]


@functools.cache
def _planned_gpt2() -> RockmateModule:
    return RockmateModule(gpt2(n_layer=1), batch(), 0.6)


def planned_gpt2() -> tuple[Any, Any]:
    """A model and its planned module: a copy of one that is planned once."""
    module = copy.deepcopy(_planned_gpt2())
    return module.original, module


def step(callee: Any) -> None:
    callee(**batch()).loss.backward()


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_larger_vocabulary_after_planning(
    has_trained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, module = planned_gpt2()
    # Hugging Face gives the same parameter other data, whose shape autograd must not remember
    if has_trained:
        module(**batch()).loss.backward()
        module.zero_grad()
    module.resize_token_embeddings(VOCABULARY + 8)
    reference = copy.deepcopy(model)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        same_gradients(module, reference, step)
        module(**batch(2)).loss.backward()
    assert len(rockmate_lines(caplog)) == 1
    assert "planned for this call" in rockmate_lines(caplog)[0]


@pytest.mark.parametrize("change", ["bfloat16", "double"])
def test_another_dtype_after_planning(change: str, caplog: pytest.LogCaptureFixture) -> None:
    # with it, eager's products of fp64 attention add up in the order of another layout
    model = gpt2(attn_pdrop=0.0)
    module = RockmateModule(model, batch(), 0.6)
    assert getattr(module, change)() is module
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        same_gradients(module, copy.deepcopy(model), step)
    assert len(rockmate_lines(caplog)) == 1


def test_moving_the_module_returns_the_module_itself() -> None:
    model, module = planned_gpt2()
    for moved in (
        module.to("cpu"),
        module.to(torch.float32),
        module.cpu(),
        module.float(),
        module.eval(),
        module.train(),
    ):
        assert moved is module
    assert module.training is model.training is True
    assert module.eval().training is model.training is False


def test_untying_weights_after_planning_is_noticed() -> None:
    model, module = planned_gpt2()
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    same_gradients(module, copy.deepcopy(model), step)


# --- gradient checkpointing -----------------------------------------------------------------------


@pytest.mark.parametrize("build", [gpt2, llama])
def test_gradient_checkpointing_is_off_in_the_plan_and_stays_on_in_the_model(
    build: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    plain = Planner(build(), batch())
    # transformers 5.17 has the former name only.
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    caplog.clear()
    # what is seen without setting up logging
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        planner = Planner(model, batch())
    told = "gradient checkpointing is off in the planned forward"
    assert sum(told in line for line in rockmate_lines(caplog)) == 1
    assert len(planner.plan(1.0).graph.ops) == len(plain.plan(1.0).graph.ops)
    is_on = getattr(model, "is_activation_checkpointing", None)
    assert model.is_gradient_checkpointing if is_on is None else is_on
    reference = build()
    reference.load_state_dict(model.state_dict())
    same_gradients(planner.module(0.6), reference, step)


# --- exceptions -----------------------------------------------------------------------------------


class Interrupt(Exception):
    """Stands for an interrupt or an allocation that fails."""


def test_nothing_stays_in_memory_after_an_exception_in_the_backward() -> None:
    from helpers import net_allocated

    model = models.Stack(dropout=0.3)
    module = RockmateModule(model, X, 1.0)
    module(X).square().mean().backward()
    model.zero_grad(set_to_none=False)

    def fail(gradient: torch.Tensor) -> None:
        raise Interrupt

    def broken_step() -> None:
        handle = model.layers[1][0].weight.register_hook(fail)
        try:
            module(X).square().mean().backward()
        except Interrupt:
            handle.remove()

    broken_step()
    assert net_allocated(broken_step) == 0


# --- as the original ------------------------------------------------------------------------------


def test_generate_and_saving_between_steps(tmp_path: Path) -> None:
    model, module = planned_gpt2()
    reference = copy.deepcopy(model)
    words = batch()["input_ids"][:, :4]
    module(**batch()).loss.backward()
    module.eval()
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "attention_mask": torch.ones_like(words),
        "pad_token_id": 0,
    }
    reference.eval()
    assert torch.equal(module.generate(words, **options), reference.generate(words, **options))
    with torch.no_grad():
        assert same_bits(module(**batch()).logits, reference(**batch()).logits)
        shorter = {name: value[:2, :5] for name, value in batch().items()}
        assert same_bits(module(**shorter).loss, reference(**shorter).loss)
    module.train()
    reference.train()
    same_gradients(module, reference, step)
    module.save_pretrained(tmp_path)
    recompute = type(model).from_pretrained(tmp_path)
    assert not differing(recompute.state_dict(), model.state_dict())
    assert recompute.config.architectures == ["GPT2LMHeadModel"]
    assert callable(module.push_to_hub)
    assert module.push_to_hub.__self__ is model


# --- budgets --------------------------------------------------------------------------------------


def test_an_impossible_budget_says_what_is_possible_at_the_first_call_too() -> None:
    model = models.Stack(1)
    module = RockmateModule(model, budget=1000)
    with pytest.raises(InfeasibleBudgetError) as caught:
        module(X)
    minimum = caught.value.minimum_bytes
    module = RockmateModule(model, budget=minimum)
    module(X).sum().backward()
    assert module.plan.predicted_peak_bytes <= minimum


def test_sample_of_a_first_call_with_positional_and_keyword_arguments() -> None:
    model = llama(attention_dropout=0.0)
    module, reference = RockmateModule(model, budget=0.6), copy.deepcopy(model)
    words, labels = batch()["input_ids"], batch()["labels"]
    assert words.shape[1] == LENGTH
    torch.manual_seed(1)
    ours = module(words, labels=labels).loss
    torch.manual_seed(1)
    assert same_bits(ours.detach(), reference(words, labels=labels).loss.detach())


def test_plans_that_are_held_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rockmate.entry.plan_cache.MAX_PLANS", 3)
    model = models.Stack(num_layers=1)
    module = RockmateModule(model, X, 1.0)
    for index in range(1, 5):
        next(inner for inner in model.modules() if isinstance(inner, nn.Dropout)).p = 0.05 * index
        module(X)
    assert len(module._plans.runnables) == 3
