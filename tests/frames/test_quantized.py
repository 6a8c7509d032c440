"""Frames of models whose frozen weights are quantized: as eager, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import RockmateModule

WIDTH = 64


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA beside it."""

    def __init__(self, frozen: nn.Module, inner: int, outer: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(inner, 4, bias=False), nn.Linear(4, outer, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(self.drop(x)))


class Block(nn.Module):
    def __init__(self, quantized: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.wide = Adapted(quantized(nn.Linear(WIDTH, 4 * WIDTH)), WIDTH, 4 * WIDTH)
        self.back = Adapted(quantized(nn.Linear(4 * WIDTH, WIDTH)), 4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.act(self.wide(self.norm(x))))


def by_bitsandbytes(layer: nn.Linear) -> nn.Module:
    modules: Any = pytest.importorskip("bitsandbytes").nn
    quantized = modules.Linear4bit(
        layer.in_features, layer.out_features, compute_dtype=torch.float32, quant_type="nf4"
    )
    quantized.load_state_dict(layer.state_dict())
    return quantized.to("cpu")


def by_torchao(layer: nn.Linear) -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


@pytest.mark.parametrize("quantized", [by_bitsandbytes, by_torchao])
@pytest.mark.parametrize("mode", ["frames", "auto"])
@pytest.mark.filterwarnings("ignore")
def test_equal_to_eager(quantized: Callable[[nn.Linear], nn.Module], mode: str) -> None:
    model = nn.Sequential(*(nn.Sequential(Block(quantized)) for _ in range(6)))
    plain = copy.deepcopy(model)
    for budget in (0.7, 0.4):
        module = RockmateModule(model, None, budget, mode=mode, on_infeasible="least")
        for seed in range(4):
            found = []
            for each, owner in ((module, model), (plain, plain)):
                torch.manual_seed(seed)
                owner.zero_grad()
                loss = each(torch.randn(32, WIDTH)).square().mean()
                loss.backward()
                found.append(
                    [loss.detach(), *(p.grad for p in owner.parameters() if p.grad is not None)]
                )
            assert len(found[0]) == len(found[1]) == 1 + 6 * 2 * 2 + 6 * 2
            assert all(map(torch.equal, *found))
        assert module.frames is None or module.frames.counts.num_recomputed > 0
