"""A plan serves a step whose independent ops the model runs in another order.

Models of transformers go through a set of names, so that the order differs between processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from helpers import same_bits
from torch import Tensor, nn

from rockmate import Plan, PlanMismatchError, Planner, RockmateModule
from rockmate.graph.snapshot import StepSnapshot
from rockmate.graph.snapshot_capture import snapshot_of
from rockmate.planning.step import capture_step

NAMES = ("a", "b", "c")
ORDERS = list(itertools.permutations(NAMES))


class Branches(nn.Module):
    """Branches that are made and run in the order of their names as given, and read in one order.

    They read the input alone: a value with a gradient would get its contributions in that order.

    Args:
        names: of the branches.
        dropout: of each branch.
        is_tied: whether the branches have one weight, under a name for each.
    """

    def __init__(
        self, names: Sequence[str], dropout: float = 0.0, *, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.names = names
        for name in names:
            torch.manual_seed(NAMES.index(name))
            self.add_module(name, nn.Linear(16, 16, bias=False))
            self.register_buffer(f"{name}_scale", torch.randn(16))
        if is_tied:
            for name in NAMES:
                self.get_submodule(name).weight = self.get_parameter("a.weight")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        made = {
            name: self.dropout(self.get_submodule(name)(x * getattr(self, f"{name}_scale")).tanh())
            for name in self.names
        }
        return (made["a"] * made["b"].sin() - made["c"].exp()).square().sum()


def snapshot(model: nn.Module) -> StepSnapshot:
    step = capture_step(model.train(), torch.ones(8, 16))
    return snapshot_of(step.graph, step.call)


def test_the_order_of_independent_ops_is_not_compared() -> None:
    found = [snapshot(Branches(order)) for order in ORDERS]
    assert len({each.fingerprint for each in found}) == 1
    assert len({str((each.inputs, each.outputs, each.ops)) for each in found}) == len(ORDERS)


@pytest.mark.parametrize("order", ORDERS[1:], ids="".join)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_plan_of_another_order_gives_the_bits_of_eager(
    order: tuple[str, ...], share: float
) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    planner = Planner(Branches(NAMES), x, machine="cpu-avx2")
    saved = planner.plan(
        max(planner.minimum_peak_bytes, round(share * planner.baseline_peak_bytes))
    )
    eager, model = Branches(order), Branches(order)
    eager(x).backward()
    module = RockmateModule(model, x, plan=Plan.from_text(saved.to_text()))
    module(x).backward()
    for name, parameter in eager.named_parameters():
        found = model.get_parameter(name).grad
        assert parameter.grad is not None
        assert found is not None
        assert same_bits(found, parameter.grad)
    assert module.plan.simulation == saved.simulation
    assert module.plan.block_table() == saved.block_table()
    for one, other in zip(module.plan.schedule.steps, saved.schedule.steps, strict=True):
        mine, theirs = module.plan.snapshot.ops[one], saved.snapshot.ops[other]
        assert (mine.call, mine.module) == (theirs.call, theirs.module)
        assert module.plan.costs.first[one] == saved.costs.first[other]


def test_another_order_of_draws_is_another_step() -> None:
    saved = Planner(Branches(NAMES, 0.5), torch.ones(8, 16), machine="cpu-avx2").plan(1.0)
    with pytest.raises(PlanMismatchError, match=r"op \d+ .*reads, writes or serves other values"):
        RockmateModule(Branches(("b", "a", "c"), 0.5).train(), torch.ones(8, 16), plan=saved)


def test_another_order_of_contributions_to_a_gradient_is_another_step() -> None:
    one, other = (snapshot(Branches(order, is_tied=True)) for order in (NAMES, ("b", "a", "c")))
    assert one.fingerprint != other.fingerprint
