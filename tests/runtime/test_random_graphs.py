"""What the simulator accepts, the emitter writes: random networks whose ops keep state."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_gradients_alike
from random_networks import RandomNetwork

from rockmate import InfeasibleBudgetError, Planner, RockmateModule


# In 65, 73, 74 and 109, two poolings of one value share their indices through two nodes. In 3, 7
# and 8, batch normalization is recomputed within the forward, where its running statistics last.
@pytest.mark.parametrize("seed", [*range(12), 65, 73, 74, 109])
def test_every_plan_is_emitted_and_trains_like_eager(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = RandomNetwork(seed), torch.randn(2, 8, 16, 16)
    if not any(True for _ in model.parameters()):
        pytest.skip("this network has nothing to train")
    planner = Planner(model, x, machine="cpu-avx2", numerics="bitwise")
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
        assert_gradients_alike(model, eager, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
