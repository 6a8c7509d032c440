"""A model with some of all that a trial compares, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn

from rockmate.runtime import emit

BATCHES = [torch.randn(64, 32, generator=torch.Generator().manual_seed(n)) for n in range(4)]


@made_of(lambda: {"inner": nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))})
class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Net(nn.Module):
    """Six blocks with dropout, a buffer, attributes and a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("count", torch.zeros(()))
        self.scale, self.last = 1.0, None
        self.dropout = nn.Dropout(0.1)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.count += 1
        for block in self.blocks:
            x = block(x)
        x = self.dropout(self.norm(x)) * self.scale
        self.last = x.mean().detach()
        return {"loss": x.square().mean() * torch.tensor(0.5), "features": x.detach() + 1.0}


@made_of(lambda: {"norm": nn.BatchNorm1d(32), "dropout": nn.Dropout(0.1), "calls": 0})
class Counting(Block):
    """A block that draws, counts its calls and has a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.dropout(self.norm(super().forward(x)))


def without_op(patch: pytest.MonkeyPatch, name: str, replace: Callable[[Any], Any]) -> None:
    """Has the emitted code go without the first op of a name."""
    compiled = emit.compiled

    def without(graph: Any, *arguments: Any) -> Any:
        nodes = [node for node in graph.nodes if name in str(node.target)]
        if nodes:
            replace(nodes[0])
        return compiled(graph, *arguments)

    patch.setattr(emit, "compiled", without)
