"""Gradients that planned frames return lie in memory as in eager: scripts change them in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rockmate import RockmateModule
from rockmate.errors import BackwardError

WIDTH, ROWS, STEPS = 16, 8, 6


class Block(nn.Module):
    """The gradients of two parameters may be those of its output, or views of it."""

    def __init__(self, shape: tuple[int, ...] = (ROWS, WIDTH)) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.ones(shape)) for _ in range(2))
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        one, two = (
            each.expand_as(x) if each.dim() == 2 else each.view_as(x)
            for each in (self.one, self.two)
        )
        return x + one + two + self.act(self.linear(x))


def trained(module: nn.Module, model: nn.Module) -> list[Tensor]:
    """All gradients of steps, which accumulate in two backwards and are changed in place."""
    torch.manual_seed(0)
    found: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            y = module(x)
            y.retain_grad()
            y.square().mean().backward()
            for each in (x.grad, y.grad, *(p.grad for p in model.parameters())):
                assert each is not None
                found.append(each.mul_(1.5).clone())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("budget", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (ROWS * WIDTH,), (1, WIDTH)])
def test_gradients_may_be_changed_in_place(shape: tuple[int, ...], budget: float) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(shape) for _ in range(4)))
    other = copy.deepcopy(model)
    module = RockmateModule(other, None, budget, mode="frames", on_infeasible="least")
    expected, found = trained(model, model), trained(module, other)
    assert module.frames is not None
    assert module.frames.counts.num_planned
    assert all(map(torch.equal, expected, found))


def test_batched_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    module = RockmateModule(model, None, 0.5, mode="frames", on_infeasible="least")
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    for _ in range(4):
        module(x).sum().backward()
    y = module(x)
    assert module.frames is not None
    assert module.frames.counts.num_planned
    with pytest.raises(BackwardError, match="is_grads_batched"):
        torch.autograd.grad(y, x, torch.ones(3, ROWS, WIDTH), is_grads_batched=True)
