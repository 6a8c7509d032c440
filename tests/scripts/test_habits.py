"""Scripts with a habit of their own, in each mode: what they log and train is eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from twice import Numbers, Wrap, differences, wrapped

from rockmate._torch.engine import is_profiling


def blocks() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
    )


def parametrizations_cached(wrap: Wrap) -> Numbers:
    """One computation of each weight for what runs within."""
    heads = (parametrizations.orthogonal, parametrizations.weight_norm)
    model = wrap(nn.Sequential(*(each(nn.Linear(16, 16)) for each in heads), blocks()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with parametrize.cached():
            model(torch.randn(24, 16)).square().mean().backward()
        optimizer.step()
    return [model]


def optimizers_step_in_the_backward(wrap: Wrap) -> Numbers:
    """A step of an optimizer is a hook of each parameter."""
    model, losses = wrap(blocks()), []
    optimizers = {each: torch.optim.SGD([each], 0.1) for each in model.parameters()}
    for each, optimizer in optimizers.items():
        each.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    for _ in range(3):
        losses.append(model(torch.randn(24, 16)).square().mean())
        model.zero_grad(set_to_none=False)
        losses[-1].backward()
        assert not is_profiling()
    return [*losses, model]


@pytest.mark.parametrize("mode", ["plan", "auto", "frames"])
@pytest.mark.parametrize("script", [parametrizations_cached, optimizers_step_in_the_backward])
def test_a_habit_changes_no_number(script: Callable[[Wrap], Numbers], mode: str) -> None:
    numerics = {} if mode == "frames" else {"numerics": "bitwise"}
    assert differences(script, lambda model: wrapped(model, mode=mode, **numerics)) == []
