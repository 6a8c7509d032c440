"""Saved tensors of two values, held as booleans: the same bits, or not held so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate import RockmateModule
from rockmate._torch.allocator import timeline
from rockmate.frames.derivation import derivations
from rockmate.frames.noting_cost import NotingCost
from rockmate.frames.saved import Saved
from rockmate.frames.two_valued import TwoValued
from tests.frames.test_tape import train

pytestmark = pytest.mark.model

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("other", [1.0, 1 / 0.9, 3e3])
def test_the_same_bits_and_strides(dtype: torch.dtype, other: float) -> None:
    mask = torch.randn(3, 5, 7).gt(0).double().mul_(other).to(dtype)
    large = torch.ones(300, 400).bernoulli_(0.5).to(dtype)
    negative = -torch.zeros(3, dtype=dtype)
    for tensor in (mask, mask.permute(2, 0, 1), mask[:1].clone(), large, negative, -negative):
        packed = TwoValued.of(Saved.of(tensor))
        assert packed is not None
        again = packed.unpacked().tensor
        integers = BITS[tensor.itemsize]
        assert torch.equal(again.view(integers), tensor.view(integers))
        assert (again.dtype, again.stride()) == (tensor.dtype, tensor.stride())
        assert packed.is_set.nbytes * tensor.itemsize == tensor.nbytes


def _with(value: float) -> Tensor:
    mask = torch.randn(4, 6).gt(0).float()
    mask[2, 3] = value
    return mask


def _written() -> Saved:
    saved = Saved.of(torch.randn(4, 6).gt(0).float())
    saved.tensor.mul_(2)
    return saved


@pytest.mark.parametrize(
    "saved",
    [
        *(Saved.of(_with(value)) for value in (2.0, -1.0, -0.0, float("nan"))),
        Saved.of(torch.zeros(0)),
        Saved.of(torch.ones(4, 6)[:, ::2]), Saved.of(torch.ones(4, 6)[:2]),
        Saved.of(torch.ones(1).expand(4)), Saved.of(torch.ones(4, dtype=torch.bool)), _written(),
    ],
)  # fmt: skip
def test_what_has_other_values_or_is_not_all_of_its_memory_is_left(saved: Saved) -> None:
    assert TwoValued.of(saved) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 384), nn.Linear(384, 32)
        self.has_third_value = False

    def forward(self, x: Tensor) -> Tensor:
        mask = functional.dropout(torch.ones(len(x), 384), 0.5)
        if self.has_third_value:
            mask = mask.clone()
            mask[0, 0] = 7.0
        return x + self.last(self.first(x).tanh() * mask)


@pytest.fixture
def num_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    dear = NotingCost(seen_s=1.0, noted_s=1.0, begun_s=1.0)  # so that no op runs again
    monkeypatch.setattr("rockmate.frames.derivation.noting_cost", lambda: dear)
    derivations.cache_clear()
    found: list[int] = []
    unpacked = TwoValued.unpacked

    def noted(self: TwoValued) -> Saved:
        found.append(self.is_set.numel())
        return unpacked(self)

    monkeypatch.setattr(TwoValued, "unpacked", noted)
    return found


@pytest.mark.parametrize("budget", [0.7, 0.5])
def test_masks_of_dropout_are_held_as_booleans(budget: float, num_unpacked: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Block(), nn.Identity()) for _ in range(6)))
    plain = copy.deepcopy(model)
    module = RockmateModule(
        model, None, budget, mode="frames", on_infeasible="least", plan_frames=False
    )
    for seed in range(6):
        num_unpacked.clear()
        ours, expected = train(module, model, seed), train(plain, plain, seed)
        assert all(map(torch.equal, ours, expected))
    assert num_unpacked
    assert module.frames is not None
    report, budget_bytes = module.frames.report(), module.frames.budget_bytes
    assert report is not None
    assert budget_bytes is not None
    assert "held as booleans" in report.table()
    model.zero_grad(set_to_none=False)
    x = torch.randn(512, 32)
    measured = timeline(lambda: module(x).square().mean().backward()).peak_bytes
    assert measured <= 1.01 * budget_bytes
    for each in (*model.modules(), *plain.modules()):
        if isinstance(each, Block):
            each.has_third_value = True
    num_unpacked.clear()
    ours, expected = train(module, model, 9), train(plain, plain, 9)
    assert all(map(torch.equal, ours, expected))
    assert not num_unpacked
