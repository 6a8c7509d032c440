"""What users of recomputation trip over elsewhere, one test each, with a planned module under plain
PyTorch and Hugging Face."""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from fine_tuning import LENGTH, VOCABULARY, batch, gpt2, llama
from helpers import differing, gradients_of, same_bits
from torch import nn

from bench import measure
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


def step_of(
    module: nn.Module, owner: nn.Module, call: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    owner.zero_grad()
    torch.manual_seed(7)
    output = module(**call) if call else module(X)
    loss = output.loss if call else output.square().mean()
    loss.backward()
    return loss.detach(), gradients_of(owner)


def assert_same_step(
    module: nn.Module, owner: nn.Module, reference: nn.Module, call: dict[str, torch.Tensor]
) -> None:
    ours, theirs = step_of(module, owner, call), step_of(reference, reference, call)
    assert same_bits(ours[0], theirs[0])
    assert theirs[1]
    assert not differing(ours[1], theirs[1])


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_trained", [False, True])
def test_a_larger_vocabulary_after_planning(
    has_trained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, module = planned_gpt2()
    if (
        has_trained
    ):  # Hugging Face gives the same parameter other data, whose shape autograd must not remember
        module(**batch()).loss.backward()
        module.zero_grad()
    module.resize_token_embeddings(VOCABULARY + 8)
    reference = copy.deepcopy(model)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        assert_same_step(module, model, reference, batch())
        module(**batch(2)).loss.backward()
    assert len(rockmate_lines(caplog)) == 1
    assert "planned for this call" in rockmate_lines(caplog)[0]


@pytest.mark.parametrize("change", ["bfloat16", "double"])
def test_another_dtype_after_planning(change: str, caplog: pytest.LogCaptureFixture) -> None:
    model = gpt2(
        attn_pdrop=0.0
    )  # with it, eager's products of fp64 attention add up in the order of another layout
    module = RockmateModule(model, batch(), 0.6)
    assert getattr(module, change)() is module
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        assert_same_step(module, model, copy.deepcopy(model), batch())
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


def test_a_copy_trains_on_its_own() -> None:
    model, module = planned_gpt2()
    twin = copy.deepcopy(module)
    reference = copy.deepcopy(model)
    model.zero_grad()
    assert_same_step(twin, twin.original, reference, batch())
    assert not gradients_of(model)
    assert type(twin.original) is type(model)


def test_untying_weights_after_planning_is_noticed() -> None:
    model, module = planned_gpt2()
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    assert_same_step(module, model, copy.deepcopy(model), batch())


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
    with caplog.at_level(
        logging.WARNING, logger="rockmate"
    ):  # what is seen without setting up logging
        planner = Planner(model, batch())
    assert (
        sum(
            "gradient checkpointing is off in the planned forward" in line
            for line in rockmate_lines(caplog)
        )
        == 1
    )
    assert len(planner.plan(1.0).graph.ops) == len(plain.plan(1.0).graph.ops)
    is_on = getattr(model, "is_activation_checkpointing", None)
    assert model.is_gradient_checkpointing if is_on is None else is_on
    reference = build()
    reference.load_state_dict(model.state_dict())
    assert_same_step(planner.module(0.6), model, reference, batch())


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
    assert_same_step(module, model, reference, batch())
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


def test_evaluation_before_the_first_training_call_plans_nothing() -> None:
    module = RockmateModule(llama(), budget=0.6)
    with torch.no_grad():
        module(**batch())
    module.eval()(**batch())
    assert not module.is_planned


def test_plans_that_are_held_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rockmate.entry.plan_cache.MAX_PLANS", 3)
    model = models.Stack(num_layers=1)
    module = RockmateModule(model, X, 1.0)
    for index in range(1, 5):
        next(inner for inner in model.modules() if isinstance(inner, nn.Dropout)).p = 0.05 * index
        module(X)
    assert len(module._plans.runnables) == 3


# --- what the allocator makes of a plan -----------------------------------------------------------

NUM_ROWS = 4096
RESIDENT_MARKS = f"""
import json, models, torch
from bench import measure
from rockmate import RockmateModule

torch.set_num_threads(1)
torch.manual_seed(0)
model = models.Stack(num_layers=4, width=80).train()
optimizer = torch.optim.AdamW(model.parameters())
module = RockmateModule(model, torch.randn({NUM_ROWS}, 80), 0.35)
plan = module.plan


def step(callee, num_rows):
    callee(torch.randn(num_rows, 80)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def marks(callee):
    steps = [lambda rows=rows: step(callee, rows) for rows in ({NUM_ROWS}, 3301, 2099, 3907, 2713, 3109)]
    for warm_up in steps:  # captures, and makes a program for each size
        warm_up()
    return measure.resident_marks(4 * steps)


print(json.dumps({{"budget": plan.budget_bytes, "planned": marks(module), "eager": marks(model)}}))
"""  # noqa: E501


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the process's memory from /proc"
)
def test_resident_memory_stays_within_the_budget_over_many_steps_of_many_sizes() -> None:
    """Of the whole process, so what libraries take and what fragments count as well.

    Large blocks go back to the kernel one by one.
    """
    root = Path(__file__).resolve().parents[2]
    settings = (
        os.environ
        | measure.RESIDENT_ENVIRONMENT
        | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'support'}"}
    )
    command = [sys.executable, "-c", RESIDENT_MARKS]
    finished = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root, env=settings
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    found = json.loads(finished.stdout.splitlines()[-1])
    small_bytes = 2 << 20
    largest = found["planned"][::6]
    of_script = 2 * NUM_ROWS * 80 * 4  # the input, and what the loss makes of the output
    assert max(found["planned"]) <= found["budget"] + of_script + small_bytes
    assert max(found["eager"]) >= 2 * found["budget"]  # the meter would see it
    # Nothing is left behind from step to step: six steps that each left their smallest value would
    # add 4 MB. The kernel counts resident pages of a thread in lots of 256 KiB.
    assert max(largest) <= min(largest) + small_bytes
