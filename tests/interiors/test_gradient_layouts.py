"""Kernels round by the strides of a gradient, so a planned frame is tried with those it gets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import RockmateModule

pytestmark = pytest.mark.model

WIDTH, ROWS, STEPS = 13, 7, 8
Loss = Callable[[Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "sum": lambda y: y.sum(),
    "sum of rows": lambda y: y.sum(0).square().mean(),
    "sum of columns": lambda y: y.sum(1).square().mean(),
    "transposed": lambda y: (y.t().contiguous() * torch.arange(float(ROWS))).square().mean(),
    "joined": lambda y: torch.cat([y, torch.ones(ROWS, 2)], 1).square().mean(),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Convolved(nn.Module):
    """The output is transposed; what it is added to is not, and so the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.t()[None])[0].t()


class Positions(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


def trained(module: nn.Module, model: nn.Module, losses: list[Loss]) -> list[Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: list[Tensor] = []
    for loss in losses:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss(module(x)).backward()
        assert x.grad is not None
        found += [
            x.grad,
            *(each.grad.clone() for each in model.parameters() if each.grad is not None),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found


def framed(model: nn.Module) -> RockmateModule:
    return RockmateModule(model, None, 0.5, mode="frames", on_infeasible="least")


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_hand_over_gradients_of_other_strides(name: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(4)))
    other = copy.deepcopy(model)
    module, losses = framed(other), [LOSSES[name]] * STEPS
    assert all(map(torch.equal, trained(model, model, losses), trained(module, other, losses)))


def test_frames_are_planned_with_a_gradient_of_other_strides() -> None:
    torch.manual_seed(1)
    model = Positions(*(Convolved() for _ in range(4)))
    other = copy.deepcopy(model)
    module, losses = framed(other), [lambda y: y.square().mean()] * STEPS
    assert all(map(torch.equal, trained(model, model, losses), trained(module, other, losses)))
    assert module.frames is not None
    assert module.frames.counts.num_planned


def penalty(module: nn.Module) -> Tensor:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


class Branched(Block):
    """Its output is also read outside of the next block, whose input then has readers elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.tanh() + self.body(x) + x[:, :1]


class Skipping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        total = x
        for block in self:
            y = block(x)
            total = total + y.sin()
            x = y.cos() + x
        return total


def test_another_loss_later_runs_as_in_eager() -> None:
    torch.manual_seed(1)
    model = Skipping(*(Branched() for _ in range(4)))
    other = copy.deepcopy(model)
    module, usual = framed(other), [lambda y: y.square().mean()] * STEPS
    assert all(map(torch.equal, trained(model, model, usual), trained(module, other, usual)))
    assert module.frames is not None
    assert module.frames.counts.num_planned
    for losses in ([LOSSES["sum"]], [LOSSES["transposed"]] * 2, usual):
        assert all(map(torch.equal, trained(model, model, losses), trained(module, other, losses)))


def test_a_gradient_penalty_in_some_steps() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(4)))
    other = copy.deepcopy(model)
    module, usual = framed(other), [lambda y: y.square().mean()] * STEPS
    assert all(map(torch.equal, trained(model, model, usual), trained(module, other, usual)))
    assert module.frames is not None
    assert module.frames.counts.num_planned
    for _ in range(3):
        found = []
        for each, own in ((model, model), (module, other)):
            torch.manual_seed(3)
            own.zero_grad()
            penalty(each).backward()
            found.append([p.grad for p in own.parameters()])
        for one, two in zip(*found, strict=True):
            assert one is two is None or torch.equal(one, two)


class Masked(Block):
    """Returns tensors without a gradient, too, before the one with one."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y > 0, y.detach().sum(), y


class Masking(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            mask, _, x = block(x)
            x = x * mask
        return x


def test_outputs_without_a_gradient_come_first() -> None:
    torch.manual_seed(1)
    model = Masking(*(Masked() for _ in range(4)))
    other = copy.deepcopy(model)
    module, losses = framed(other), [LOSSES["sum of columns"]] * STEPS
    assert all(map(torch.equal, trained(model, model, losses), trained(module, other, losses)))
    assert module.frames is not None
    assert module.frames.counts.num_planned
