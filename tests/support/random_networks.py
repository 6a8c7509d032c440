"""Random networks whose ops keep state."""

from __future__ import annotations

import random

import torch
from torch import nn

OPS = ("conv", "norm", "relu", "pool", "add", "concatenate", "dropout")
MODULES = {
    "conv": lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False),
    "norm": lambda: nn.BatchNorm2d(8),
    "relu": nn.ReLU,
    "pool": lambda: nn.MaxPool2d(2),
    "dropout": lambda: nn.Dropout(0.3),
}


class RandomNetwork(nn.Module):
    """A random graph of convolutions, normalizations, poolings and sums; equal ops may repeat."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList()
        self.calls: list[tuple[str, int, int]] = []  # op, layer or other operand, operand
        sizes = [16]
        for _ in range(draw.randint(6, 14)):
            op, source = draw.choice(OPS), draw.randrange(max(0, len(sizes) - 4), len(sizes))
            if op == "pool" and sizes[source] < 4:
                continue
            if op in MODULES:
                self.layers.append(MODULES[op]())
                self.calls.append((op, len(self.layers) - 1, source))
            else:
                others = [i for i, size in enumerate(sizes) if size == sizes[source]]
                self.calls.append((op, draw.choice(others), source))
            sizes.append(sizes[source] // 2 if op == "pool" else sizes[source])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for op, other, source in self.calls:
            if op == "add":
                values.append(values[source] * 1.5 + values[other])
            elif op == "concatenate":
                both = torch.cat([values[source], values[other]], 1)
                values.append(both[:, ::2].contiguous())
            else:
                values.append(self.layers[other](values[source]))
        return sum((value.square().mean() for value in values[1:]), torch.zeros(()))
