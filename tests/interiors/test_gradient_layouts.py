"""Kernels round by the strides of a gradient, so a planned frame is tried with those it gets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_trains_alike, records_of
from made_of import made_of, mlp
from torch import Tensor, nn

from rockmate import RockmateModule
from rockmate.errors import BackwardError
from tests.frames.test_frames import framed

WIDTH, ROWS, STEPS = 13, 7, 8
Loss = Callable[[Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "sum": lambda y: y.sum(),
    "sum of rows": lambda y: y.sum(0).square().mean(),
    "sum of columns": lambda y: y.sum(1).square().mean(),
    "transposed": lambda y: (y.t().contiguous() * torch.arange(float(ROWS))).square().mean(),
    "joined": lambda y: torch.cat([y, torch.ones(ROWS, 2)], 1).square().mean(),
}


@made_of(lambda: {"body": nn.Sequential(nn.LayerNorm(WIDTH), *mlp(WIDTH, 3 * WIDTH))})
class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@made_of(lambda: {"conv": nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GELU())})
class Convolved(nn.Module):
    """The output is transposed; what it is added to is not, and so the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.t()[None])[0].t()


class Positions(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


@pytest.mark.parametrize("shape", [(48, WIDTH), (2, 24, WIDTH), (4, WIDTH, 16, 16)])
def test_a_plan_takes_the_gradient_of_a_head_as_it_lies(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = partial(nn.Conv2d, kernel_size=1) if len(shape) == 4 else nn.Linear
    model = nn.Sequential(layer(WIDTH, WIDTH), nn.Tanh(), layer(WIDTH, 3))
    model = model.to(memory_format=torch.channels_last)
    x, found = torch.randn(shape), list[Any]()
    for each in (model, RockmateModule(copy.deepcopy(model), x, 1.0, numerics="bitwise")):
        each(x).mT.contiguous().cos().mean().backward()
        found.append([parameter.grad for parameter in each.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def loss_by(loss: Loss, module: nn.Module, _: int) -> list[Tensor]:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    return [loss(module(x)), x]


def check(model: nn.Module, loss: Loss, *, is_planned: bool) -> None:
    """A copy in frames has eager's gradients in all steps."""
    module = framed(copy.deepcopy(model))
    assert_trains_alike(module, model, partial(loss_by, loss), STEPS)
    assert module.frames is not None
    assert module.frames.counts.num_planned or not is_planned


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_hand_over_gradients_of_other_strides(name: str) -> None:
    torch.manual_seed(1)
    check(nn.Sequential(*(Block() for _ in range(4))), LOSSES[name], is_planned=False)


def test_frames_are_planned_with_a_gradient_of_other_strides() -> None:
    torch.manual_seed(1)
    model = Positions(*(Convolved() for _ in range(4)))
    check(model, lambda y: y.square().mean(), is_planned=True)


class Ending(Block):
    """Is kept, since its backward comes first; hands on the gradient of its output as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x.detach())


def test_another_loss_is_refused_rather_than_rounded_otherwise() -> None:
    model = nn.Sequential(*(Block() for _ in range(4)), Ending())
    module = framed(model)
    loss = partial(loss_by, lambda y: y.square().mean())
    records_of(module, model, loss, 3)
    assert module.frames is not None
    assert module.frames.needs is not None
    for needs in module.frames.needs.by_key.values():
        needs.seconds = 1.0  # times of the machine are not to decide
    records_of(module, model, loss, 5)
    assert module.frames.counts.num_planned
    with pytest.raises(BackwardError, match="an output of 3"):
        loss_by(LOSSES["sum"], module, 8)[0].backward()


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
    check(Masking(*(Masked() for _ in range(4))), LOSSES["sum of columns"], is_planned=True)
