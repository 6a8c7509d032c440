"""Several planned forwards before one backward: hooks fire once, with whole gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_gradients_alike
from torch import Tensor, nn

from rockmate import RockmateModule


def make_model(normed: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(normed(nn.Linear(16, 32)), nn.GELU(), normed(nn.Linear(32, 16)))


def batch(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def pairs(*how: Any) -> list[tuple[nn.Module, nn.Module]]:
    """(what the script calls, the model): planned, then plain."""
    ours, plain = make_model(*how), make_model(*how)
    options: Any = {"machine": "cpu-avx2", "in_flight": 3}
    return [(RockmateModule(ours, batch(8, 0), 1.0, **options), ours), (plain, plain)]


def clipped(gradient: Tensor) -> Tensor:
    """Not linear: that of a sum is not the sum of two."""
    return gradient / gradient.norm()


def two_towers(callee: nn.Module) -> None:
    (callee(batch(8, 1)) * callee(batch(8, 2))).mean().backward()


def towers_of_two_sizes(callee: nn.Module) -> None:
    (callee(batch(8, 1)).mean(0) * callee(batch(5, 2)).mean(0)).mean().backward()


def three_calls_two_backwards(callee: nn.Module) -> None:
    first, second, third = (callee(batch(8, seed)).square().mean() for seed in range(3))
    (first + third).backward()
    second.backward()


def a_call_whose_backward_never_runs(callee: nn.Module) -> None:
    unused = callee(batch(8, 3))
    callee(batch(8, 1)).square().mean().backward()
    del unused


def retained(callee: nn.Module) -> None:
    loss = callee(batch(8, 1)).square().mean() + callee(batch(8, 2)).mean()
    loss.backward(retain_graph=True)
    loss.backward()


SCRIPTS = [
    two_towers,
    towers_of_two_sizes,
    three_calls_two_backwards,
    a_call_whose_backward_never_runs,
    retained,
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_tensor_hooks_see_the_whole_gradient(script: Callable[[nn.Module], None]) -> None:
    (ours, model), (eager, plain) = pairs()
    for owner in (model, plain):
        for parameter in owner.parameters():
            parameter.register_hook(clipped)
    script(ours)
    script(eager)
    assert_gradients_alike(model, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("hook", [None, clipped])
@pytest.mark.parametrize("script", [two_towers, towers_of_two_sizes])
def test_gradients_of_several_uses_in_each_forward_add_up_in_eagers_order(
    script: Callable[[nn.Module], None], hook: Any
) -> None:
    """A spectral norm reads its weight twice."""
    (ours, model), (eager, plain) = pairs(nn.utils.parametrizations.spectral_norm)
    for owner in (model, plain):
        if hook:
            owner[0].parametrizations.weight.original.register_hook(hook)
    script(ours)
    script(eager)
    assert_gradients_alike(model, plain)


@pytest.mark.parametrize(
    "script", [two_towers, towers_of_two_sizes, a_call_whose_backward_never_runs]
)
def test_an_optimizer_in_the_backward_steps_as_often(script: Callable[[nn.Module], None]) -> None:
    """The usual recipe: the hook steps, and frees the gradient."""
    (ours, model), (eager, plain) = pairs()
    counts = [0, 0]
    for place, owner in enumerate((model, plain)):
        optimizers = {
            parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in owner.parameters()
        }

        def step(parameter: Tensor, place: int, optimizers: dict[Tensor, Any]) -> None:
            optimizers[parameter].step()
            parameter.grad = None
            counts[place] += 1

        for parameter in owner.parameters():
            hook = partial(step, place=place, optimizers=optimizers)
            parameter.register_post_accumulate_grad_hook(hook)
    script(ours)
    script(eager)
    assert counts[0] == counts[1]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_parameter_frozen_between_the_forwards_keeps_its_gradient() -> None:
    (ours, model), (eager, plain) = pairs()
    for callee, owner in ((ours, model), (eager, plain)):
        owner[0].weight.register_hook(clipped)
        first = callee(batch(8, 1)).square().mean()
        owner[0].weight.requires_grad_(False)
        second = callee(batch(8, 2)).square().mean()
        owner[0].weight.requires_grad_(True)
        (first + second).backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=1e-5, atol=1e-7)
