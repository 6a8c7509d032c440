"""On a GPU, frozen weights at home in the host's memory: eager's bits, and the predicted peak."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import same_gradients
from torch import nn

from bench.measure import allocator_peak
from rockmate import RockmateModule, send_home


class MeanSquare(nn.Module):
    """The loss, within the model: what it takes counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def half_frozen() -> nn.Module:
    """Weights frozen, biases trained."""
    torch.manual_seed(0)
    parts = [part for _ in range(12) for part in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*parts, MeanSquare()).train().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


@pytest.mark.parametrize("is_from_host", [False, True])
def test_weights_at_home(cuda: torch.device, *, is_from_host: bool) -> None:
    model = half_frozen()
    eager = copy.deepcopy(model).to(cuda)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    if is_from_host:
        before = torch.cuda.memory_allocated()
        send_home(model, "host", cuda)
        assert torch.cuda.memory_allocated() - before < weight_bytes // 8
    model = model.to(cuda)
    assert {each.device for each in model.parameters()} == {cuda}
    batch = torch.randn(4096, 1024, device=cuda)
    budget = weight_bytes // 3 + 4 * batch.nbytes
    module = RockmateModule(model, batch, budget, offload="host", weights="auto")
    assert module.plan.schedule.fetches
    for number in range(3):
        x = batch + number
        same_gradients(module, eager, lambda callee, x=x: callee(x).backward())
        with torch.no_grad():
            assert torch.equal(model(x), eager(x))
    peak_bytes = allocator_peak(lambda: module(batch).backward(), device=cuda)
    assert peak_bytes <= module.plan.budget_bytes + 4096
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
