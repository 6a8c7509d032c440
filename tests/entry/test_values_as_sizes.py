"""Numbers that a forward reads from its inputs are sizes: another one takes over a schedule."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from helpers import assert_same, one_step
from made_of import made_of
from torch import Tensor, nn

from rockmate import RockmateModule

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))


@made_of(lambda: {"layer": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
class Grids(nn.Module):
    """Packed rows of images: split by lengths that follow from an input, and positions in them."""

    def forward(self, x: Tensor, grids: Tensor) -> Tensor:
        sizes = grids.prod(-1)
        ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        parts = [
            self.layer(part).tanh() * (1 + self.layer(part).softmax(0))
            for part in x.split((ends[1:] - ends[:-1]).tolist())
        ]
        rows = torch.cat([torch.arange(h).repeat_interleave(w) for h, w in grids.tolist()])
        return self.head(torch.cat(parts)).sin() * (1 + rows[:, None])


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Chosen(nn.Module):
    """Takes the rows that a mask chooses, whose number it reads."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x[mask]).tanh() * self.layer(x[mask]).sin()


def grids(*sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return X[: sum(h * w for h, w in sizes)], torch.tensor(sizes)


def mask(number: int) -> tuple[Tensor, Tensor]:
    return X, torch.arange(24) % 24 < number


CALLS = {
    Grids: [
        grids((4, 3), (3, 4)),
        grids((2, 3), (3, 3)),
        grids((3, 4), (2, 3)),
        grids((4, 2), (4, 3)),
        grids((2, 2), (4, 5)),
        grids((3, 2), (2, 2)),
    ],
    Chosen: [mask(each) for each in (20, 12, 7, 9, 15, 18)],
}


@pytest.mark.parametrize("model_class", CALLS)
def test_other_numbers_are_adapted(
    model_class: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rockmate")
    model, calls = model_class(), CALLS[model_class]
    plain = copy.deepcopy(model)
    module = RockmateModule(model, calls[0], budget=0.9, on_infeasible="least")
    for seed, call in enumerate(calls):

        def loss(each: nn.Module, _: int, call: tuple[Tensor, ...] = call) -> tuple[Tensor, Tensor]:
            return (output := each(*call)), output.square().mean()

        assert_same(
            *(
                one_step(each, owner, loss, seed)
                for each, owner in ((module, model), (plain, plain))
            )
        )
    assert sum(each.is_adapted for each in module._plans.runnables) >= len(calls) - 3
    assert "captured with symbolic sizes" in caplog.text
    assert "there is no" not in caplog.text
