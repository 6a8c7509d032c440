"""Several planned forwards before one backward: hooks fire once, with whole gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_gradients_alike
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

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


def two_towers_twice(callee: nn.Module) -> None:
    two_towers(callee)
    two_towers(callee)


SCRIPTS = [
    two_towers,
    two_towers_twice,
    towers_of_two_sizes,
    three_calls_two_backwards,
    a_call_whose_backward_never_runs,
    retained,
]


@pytest.mark.parametrize("hook", [clipped, "of several", None])
@pytest.mark.parametrize("script", SCRIPTS)
def test_gradients_add_up_as_in_eager_and_hooks_see_them_whole(
    script: Callable[[nn.Module], None], hook: Any
) -> None:
    """Each forward reads a weight with a spectral norm twice."""
    (ours, model), (eager, plain) = pairs(nn.utils.parametrizations.spectral_norm)
    for owner in (model, plain):
        if hook == "of several":
            register_multi_grad_hook([*owner.parameters()], lambda _: None)
        for parameter in owner.parameters() if callable(hook) else ():
            parameter.register_hook(hook)
    script(ours)
    script(eager)
    adds_to_earlier = script in (three_calls_two_backwards, two_towers_twice, retained)
    adds_to_earlier |= hook == "of several"  # which the engine adds up, a sum for each forward
    rounding = {"rtol": 1e-5, "atol": 1e-7} if adds_to_earlier else {}
    assert_gradients_alike(model, plain, **rounding)


@pytest.mark.parametrize(
    "script", [two_towers, towers_of_two_sizes, a_call_whose_backward_never_runs]
)
def test_an_optimizer_in_the_backward_steps_as_often(script: Callable[[nn.Module], None]) -> None:
    """The usual recipe: the hook steps, and frees the gradient."""
    (ours, model), (eager, plain) = pairs()
    counts = [0, 0]
    for place, owner in enumerate((model, plain)):
        for parameter in owner.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(own: Tensor, place: int = place, optimizer: Any = optimizer) -> None:
                optimizer.step()
                own.grad = None
                counts[place] += 1

            parameter.register_post_accumulate_grad_hook(step)
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
