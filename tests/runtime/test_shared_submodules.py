"""A submodule under several names trains like eager: its parameters have one gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rockmate import RockmateModule


class Tied(nn.Module):
    """Calls one linear layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.one = self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.relu(self.one(self.first(x))))


@pytest.mark.parametrize("budget", [1.0, 0.8])
def test_a_submodule_under_two_names_has_eagers_gradients(budget: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Tied(), Tied(), nn.Linear(8, 1))
    eager, x = copy.deepcopy(model), torch.randn(64, 8)
    module = RockmateModule(model, x, budget=budget)
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for _ in range(2):
        module(x).sum().backward()
        eager(x).sum().backward()
    assert sorted(fired) == sorted(2 * [name for name, _ in model.named_parameters()])
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)
