"""Small models of tests of fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """An activation in single ops between products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h.pow(3))))
        return self.last(h)


class Scored(nn.Module):
    """A block with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).square().mean()
