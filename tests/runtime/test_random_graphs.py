"""What the simulator accepts, the emitter writes: random networks whose ops keep state."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from rockmate import InfeasibleBudgetError, Planner, RockmateModule

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


# In 65, 73, 74 and 109, two poolings of one value share their indices through two nodes. In 3, 7
# and 8, batch normalization is recomputed within the forward, where its running statistics last.
@pytest.mark.parametrize("seed", [*range(12), 65, 73, 74, 109])
def test_every_plan_is_emitted_and_trains_like_eager(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = RandomNetwork(seed), torch.randn(2, 8, 16, 16)
    if not any(True for _ in model.parameters()):
        pytest.skip("this network has nothing to train")
    planner = Planner(model, x, machine="cpu-avx2", allow_chunking=False)
    for budget in (planner.minimum_peak_bytes, 0.7):
        try:
            plan = planner.plan(budget)
        except InfeasibleBudgetError:
            continue
        eager = copy.deepcopy(model)
        module = RockmateModule(model, x, plan=plan)
        for callee in (module, eager):
            torch.manual_seed(1)
            callee.zero_grad()
            callee(x).backward()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
