"""Inputs that the script overwrites between the forward and the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_gradients_alike
from made_of import made_of
from torch import Tensor, nn

from rockmate import BackwardError, Planner, RockmateModule
from rockmate._torch.allocator import timeline


@made_of(lambda: {"layers": nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))})
class Normalizing(nn.Module):
    """Its first values are as large as the input and cheap, so a tight budget recomputes them."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.layers(x.expand(8, -1, -1) * 2 - shift).sin()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 64, 64, generator=generator), torch.randn(64, generator=generator)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Normalizing()


OVERWRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.div_(255),
    "data": lambda x: x.data.zero_(),
    "numpy": lambda x: x.numpy().fill(7),
    "storage": lambda x: x.set_(torch.zeros_like(x)),
}


@pytest.mark.parametrize("kind", sorted(OVERWRITES))
def test_a_recomputation_reads_the_values_of_the_forward(kind: str) -> None:
    planner = Planner(model(), inputs(), machine="cpu-avx2")
    plan = planner.plan(planner.minimum_peak_bytes)
    recomputed = {plan.graph.ops[index].node.target for index in plan.schedule.backward}
    assert torch.ops.aten.mul.Tensor in recomputed, "the test needs a recomputation from an input"
    ours, eager = model(), model()
    for module, owner in ((RockmateModule(ours, inputs(), plan=plan), ours), (eager, eager)):
        given = inputs()
        loss = module(*given).sum()
        for tensor in given:
            OVERWRITES[kind](tensor)
        loss.backward()
        assert owner.layers[0].weight.grad is not None
    assert_gradients_alike(ours, eager)


def test_the_copies_are_inside_the_budget() -> None:
    ours = model()
    planner = Planner(ours, inputs(), machine="cpu-avx2")
    module = planner.module(planner.minimum_peak_bytes)
    given = inputs()
    module(*given).sum().backward()
    peak = timeline(lambda: module(*given).sum().backward()).peak_bytes
    assert peak <= module.plan.budget_bytes


def test_what_the_backward_reads_otherwise_than_eager_is_refused() -> None:
    """Where a bias is added again, and where autocast casts the products of the backward."""
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    ours, x = nn.Sequential(*blocks), torch.randn(64, 32)
    module = RockmateModule(ours, x, 0.6, machine="cpu-avx2")
    loss = module(x).sum()
    with torch.autocast("cpu"), pytest.raises(BackwardError, match="behind the autocast context"):
        loss.backward(retain_graph=True)
    blocks[0][0].bias.data.add_(1)
    with pytest.raises(BackwardError, match=r"by way of `tensor.data`"):
        loss.backward()
