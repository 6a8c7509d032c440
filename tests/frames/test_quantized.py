"""Frames of models whose frozen weights are quantized: as eager, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rockmate import RockmateModule
from tests.entry.test_quantized import Block, by_int8, by_nf4

WIDTH = 64


@pytest.mark.parametrize("quantized", [by_nf4, by_int8])
@pytest.mark.parametrize("mode", ["frames", "auto"])
@pytest.mark.filterwarnings("ignore")
def test_equal_to_eager(quantized: Callable[[nn.Linear], nn.Module], mode: str) -> None:
    model = nn.Sequential(*(nn.Sequential(Block(quantized, WIDTH)) for _ in range(6)))
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
