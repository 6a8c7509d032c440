"""Gradients of several uses are added to each other first with `numerics="bitwise"`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn

from rockmate import Plan, RockmateModule


class Tied(nn.Module):
    """A tiny language model whose embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        scores = self.head(hidden + self.body(hidden))
        return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


@made_of(lambda: {"layer": nn.Sequential(nn.Linear(16, 16), nn.Tanh())})
class Twice(nn.Module):
    """A layer that is called twice, opaque or not."""

    def forward(self, words: Tensor) -> Tensor:
        x = nn.functional.one_hot(words, 16).float()
        return self.layer(self.layer(x)).square().mean()


def words(seed: int, most: int) -> Tensor:
    return torch.randint(most, (8, 12), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("budget", [1.0, 0.6])
@pytest.mark.parametrize(
    ("make", "options"),
    [(Tied, {}), (Twice, {}), (Twice, {"untraced": ["layer"]})],
    ids=["tied", "twice", "twice, opaque"],
)
def test_accumulated_gradients_are_bitwise_eagers(
    make: Any, options: dict[str, Any], budget: float
) -> None:
    torch.manual_seed(0)
    model = make()
    eager, most = copy.deepcopy(model), 40 if make is Tied else 16
    module = RockmateModule(
        model, words(0, most), budget, numerics="bitwise", on_infeasible="least", **options
    )
    for seed in range(4):
        for callee in (module, eager):
            callee(words(seed, most)).backward()
        for name, parameter in eager.named_parameters():
            found = model.get_parameter(name).grad
            assert found is not None
            assert parameter.grad is not None
            assert torch.equal(found, parameter.grad), (seed, name)


def test_a_plan_file_keeps_whole_gradients(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Tied()
    eager = copy.deepcopy(model)
    plan = RockmateModule(model, words(0, 40), 0.8, numerics="bitwise").plan
    plan.save(tmp_path / "plan.json")
    module = RockmateModule(model, words(0, 40), plan=Plan.load(tmp_path / "plan.json"))
    for seed in range(3):
        module(words(seed, 40)).backward()
        eager(words(seed, 40)).backward()
    assert model.embed.weight.grad is not None
    assert torch.equal(model.embed.weight.grad, eager.embed.weight.grad)
