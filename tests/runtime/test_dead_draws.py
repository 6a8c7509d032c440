"""A draw whose result nothing reads still moves the generator, as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import same_gradients
from made_of import made_of
from torch import Tensor, nn
from torch.nn import functional

from rockmate import RockmateModule


@made_of(lambda: {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)})
class DeadDropout(nn.Module):
    """A dropout without a reader comes before one with a reader."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        functional.dropout(hidden, 0.5)
        return self.second(functional.dropout(hidden, 0.5)).square().mean()


@pytest.mark.parametrize("budget", [1.0, 0.9])
def test_later_masks_are_eagers(budget: float) -> None:
    model, x = DeadDropout().train(), torch.randn(16, 8)
    eager = copy.deepcopy(model)
    module = RockmateModule(model, x, budget, on_infeasible="least")
    same_gradients(module, eager, lambda callee: (torch.manual_seed(3), callee(x).backward()))
