"""Each Hugging Face architecture wraps, trains three steps with its dropout inside a budget that
forces recomputation, and equals eager.

Equal is bit for bit: losses, gradients, buffers and the generator's state; both run without a
key/value cache, which makes eager round otherwise. Architectures that cannot be captured are
refused with what stands in the way.
"""

from __future__ import annotations

import copy
import re

import architectures
import pytest
import torch
from architectures import ARCHITECTURES, REFUSED, Architecture
from helpers import Loss, assert_close, assert_same_steps, train
from torch import nn

from rockmate import Planner, RockmateModule
from rockmate.errors import UnsupportedModelError


def loss_of(architecture: Architecture) -> Loss:
    def loss(module: nn.Module, step: int) -> tuple[None, torch.Tensor]:
        return None, module(**architecture.make_batch(step)).loss

    return loss


def tight_module(model: nn.Module, architecture: Architecture) -> RockmateModule:
    planner = Planner(model, architecture.make_batch(1), numerics="bitwise")
    return planner.module(planner.minimum_peak_bytes)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_three_steps_within_a_tight_budget_are_eagers(name: str) -> None:
    architectures.skip_if_refused(name)
    architecture = ARCHITECTURES[name]
    model, eager = architectures.make(name), architectures.make(name)
    module = tight_module(model, architecture)
    assert module.plan.schedule.num_recomputations() > 0
    ours = train(module, model, loss_of(architecture))
    assert_same_steps(ours, train(eager, eager, loss_of(architecture)))
    assert len({step.loss.item() for step in ours}) == 3  # the weights did move
    assert all(gradient.isfinite().all() for gradient in ours[-1].gradients.values())


def test_eagers_cache_changes_rounding_only() -> None:
    architecture = ARCHITECTURES["gpt2"]
    """Its attention is a matrix product here, whose rounding depends on the layout of the keys."""
    model, eager = architectures.make("gpt2"), architectures.make("gpt2")
    model.config.use_cache = eager.config.use_cache = True  # pyright: ignore
    ours = train(tight_module(model, architecture), model, loss_of(architecture), num_steps=1)
    assert_close(ours[0], train(eager, eager, loss_of(architecture), num_steps=1)[0])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_captured_is_refused_by_name(name: str) -> None:
    architectures.skip_if_refused(name)  # for another reason
    refused = REFUSED[name]
    model = refused.build().train()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModelError) as caught:
        RockmateModule(model, refused.make_batch(1), 0.5)
    for part in refused.says:
        assert re.search(part, str(caught.value)), f"{part!r} is not in {caught.value}"
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model(**refused.make_batch(1)).loss.backward()  # and trains on as before


def test_recorders_of_hidden_states_are_no_change_of_the_model() -> None:
    """A model puts them on its layers when it is first asked for hidden states, which may be after
    it was wrapped."""
    model = architectures.make("llama")
    batch = ARCHITECTURES["llama"].make_batch(1)
    module = tight_module(model, ARCHITECTURES["llama"])
    before = sum(len(inner._forward_hooks) for inner in model.modules())
    module.eval()
    hidden_states = module(**batch, output_hidden_states=True).hidden_states
    assert len(hidden_states) == 3
    assert sum(len(inner._forward_hooks) for inner in model.modules()) > before
    module.train()
    module(**batch).loss.backward()
