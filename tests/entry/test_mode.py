"""Training mode is one truth, however it is set: on the wrapper, on the model, or by attribute."""

from __future__ import annotations

import copy

import torch
from helpers import same_gradients
from made_of import made_of
from torch import nn

from rockmate import RockmateModule


@made_of(lambda: {"linear": nn.Linear(16, 16), "dropout": nn.Dropout(0.5)})
class Net(nn.Module):
    """Its own `training` decides, besides that of its dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.linear(x))
        return (2 * y if self.training else y).square().sum()


def pair() -> tuple[Net, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 16)
    return copy.deepcopy(model), RockmateModule(model, x, budget=1.0), x


def assert_equal_steps(eager: nn.Module, module: nn.Module, x: torch.Tensor) -> None:
    same_gradients(module, eager, lambda callee: (torch.manual_seed(1), callee(x).backward()))


def test_mode_set_by_attribute_reaches_the_model() -> None:
    """As Lightning restores it after its validation."""
    eager, module, x = pair()
    modes = {each: each.training for each in (*eager.modules(), *module.modules())}
    for each in modes:
        each.training = False
    assert torch.equal(eager(x), module(x))
    assert not module.training
    for each, mode in modes.items():
        each.training = mode
    assert module.training
    assert_equal_steps(eager, module, x)


def test_a_submodule_in_another_mode_is_planned_for() -> None:
    eager, module, x = pair()
    eager.dropout.training = False
    module.get_submodule("dropout").training = False
    assert_equal_steps(eager, module, x)


def test_the_mode_of_the_model_is_that_of_the_wrapper() -> None:
    _, module, _ = pair()
    module.original.eval()  # pyright: ignore
    assert not module.training
    module.train()
    assert module.original.training  # pyright: ignore
