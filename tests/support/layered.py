"""A model in which layers and loss block compete for the budget."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate import Planner
from rockmate.capture.options import Numerics


class Layered(nn.Module):
    """Two residual layers under a head of many logits.

    Layers and loss block compete for the budget.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2048, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(2)
        )
        self.head = nn.Linear(32, 2048, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        hidden = self.words(words)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return {"loss": functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def layered_batch() -> dict[str, Tensor]:
    """Words and labels."""
    words = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(0))
    return {"words": words, "labels": words.flip(0)}


def layered(numerics: Numerics = "any_order") -> Planner:
    """Its planner, with estimated costs: the same in every run."""
    return Planner(Layered().train(), layered_batch(), machine="cpu-avx2", numerics=numerics)
