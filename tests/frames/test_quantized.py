"""Frames of models whose frozen weights are quantized: as eager, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import assert_trains_alike
from torch import Tensor, nn

from rockmate import RockmateModule
from tests.entry.test_quantized import Block, by_int8, by_nf4

WIDTH = 64


@pytest.mark.parametrize("quantized", [by_nf4, by_int8])
@pytest.mark.parametrize(("mode", "budget"), [("frames", 0.4), ("auto", 0.7)])
@pytest.mark.filterwarnings("ignore")
def test_equal_to_eager(
    quantized: Callable[[nn.Linear], nn.Module], mode: str, budget: float
) -> None:
    model = nn.Sequential(*(nn.Sequential(Block(quantized, WIDTH)) for _ in range(4)))
    plain = copy.deepcopy(model)
    module = RockmateModule(model, None, budget, mode=mode, on_infeasible="least")

    def loss(callee: nn.Module, _: int) -> Tensor:
        return callee(torch.randn(32, WIDTH)).square().mean()

    assert_trains_alike(module, plain, loss)
    assert sum(each.grad is not None for each in plain.parameters()) == 4 * (2 * 2 + 2)
    assert module.frames is None or module.frames.counts.num_recomputed > 0
