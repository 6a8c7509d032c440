"""Small models of tests of fused kernels."""

from __future__ import annotations

import torch
from helpers import assert_gradients_alike
from made_of import made_of
from torch import Tensor, nn

from rockmate import RockmateModule


@made_of(lambda: {"first": nn.Linear(64, 64), "last": nn.Linear(64, 64)})
class Block(nn.Module):
    """An activation in single ops between products."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h.pow(3))))
        return self.last(h)


@made_of(lambda: {"block": Block()})
class Scored(nn.Module):
    """A block with a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()


def assert_trains_alike(module: RockmateModule, eager: nn.Module, rows: int) -> None:
    """A step on a batch of so many rows of 64 values gives a fused module eager's gradients."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    for callee in (module, eager):
        torch.manual_seed(rows)
        callee(x).square().mean().backward()
    assert_gradients_alike(module, eager, rtol=1e-4, atol=1e-6)
