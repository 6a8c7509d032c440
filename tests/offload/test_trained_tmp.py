"""Trained weights at home on a disk: eager's bits, and nothing of training beside activations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gradients_of, net_allocated
from torch import Tensor, nn

from bench.measure import allocator_peak
from rockmate import Planner, RockmateModule

QUICK: dict[str, Any] = {"time_limit_s": 0.5, "numerics": "bitwise"}


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Net(*[part for _ in range(16) for part in (nn.Linear(128, 128), nn.GELU())]).train()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(seed))


def size_of(model):
    return sum(each.nbytes for each in model.parameters())


OPT = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPT)
@pytest.mark.parametrize("in_backward", [False, True])
def test_trained(tmp_path: Path, name: str, in_backward: bool) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    module = RockmateModule(
        model, rows(), size_of(model) // 3, offload=f"disk:{tmp_path}", weights="all", **QUICK
    )
    assert module.plan.schedule.fetches
    print(module.plan.summary())

    def opt_of(m):
        if not in_backward:
            o = OPT[name](m.parameters())
            return lambda: (o.step(), o.zero_grad())
        for p in m.parameters():
            o = OPT[name]([p])

            def hook(p, o=o):
                o.step()
                o.zero_grad()

            p.register_post_accumulate_grad_hook(hook)
        return lambda: None

    steps = [opt_of(each) for each in (model, eager)]
    for seed in range(4):
        losses = []
        for callee, step in zip((module, eager), steps):
            for part in (0, 1):
                loss = callee(rows(2 * seed + part))
                loss.backward()
                losses.append(loss.item())
            step()
        assert losses[:2] == losses[2:]
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
    x = rows(1)
    measured = allocator_peak(lambda: module(x).backward())
    assert measured == module.plan.predicted_peak_bytes <= module.plan.budget_bytes
    assert net_allocated(lambda: module(x).backward()) == 0
