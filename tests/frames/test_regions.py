"""Ops are observed only within the submodules that hold those which run again."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from torch import Tensor, nn

from rockmate import RockmateModule
from rockmate._torch.storage import storage_id, version_of
from rockmate.frames.derivation import derivations
from rockmate.frames.frame import Frame
from rockmate.frames.noting_cost import NotingCost
from rockmate.frames.regions import PartKey, Region, Regions
from rockmate.frames.saved import Saved
from rockmate.frames.tape import Tape
from tests.frames.test_tape import train

pytestmark = pytest.mark.model


def random_regions(draw: random.Random, begin: int, end: int, path: str) -> list[Region]:
    """Regions within one another or apart."""
    found = []
    while begin < end:
        begin += draw.randint(0, 3)
        last = min(end, begin + draw.randint(0, 6))
        inner = f"{path}.{len(found)}"
        found.append(Region(PartKey(inner, 0), begin, last))
        if draw.random() < 0.5:
            found += random_regions(draw, begin, last, inner)
        begin = last
    return [each for each in found if each.begin <= each.end]


def test_the_smallest_regions_around_some_ops() -> None:
    num_found = 0
    for seed in range(300):
        draw = random.Random(seed)
        num_ops = draw.randint(1, 20)
        regions = [each for each in random_regions(draw, 0, num_ops, "") if each.end <= num_ops]
        ops = draw.sample(range(num_ops), draw.randint(1, min(4, num_ops)))
        found = Regions(regions, num_ops).around(ops)
        holding = [[each for each in regions if each.begin <= at < each.end] for at in ops]
        if not all(holding):
            assert found is None
            continue
        num_found += 1
        assert found is not None
        for at in ops:
            assert sum(each.begin <= at < each.end for each in found) == 1
        for each in found:  # it is the smallest region of one of the ops
            sizes = [
                min(one.num_ops for one in around)
                for at, around in zip(ops, holding, strict=True)
                if each.begin <= at < each.end
            ]
            assert each.num_ops in sizes
    assert num_found > 50


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))


class Other(nn.Module):
    """What the script does between the parts: unseen if only those are observed."""

    what = "nothing"

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "writes":
            return x.mul_(1.5)
        return x.mul(1.5) if self.what == "multiplies" else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 384), nn.Linear(384, 32)
        self.act, self.other, self.norm = Gelu(), Other(), nn.LayerNorm(384)

    def forward(self, x: Tensor) -> Tensor:
        views = x.view(-1, 4, 8).transpose(0, 1).transpose(0, 1).reshape(x.shape)  # are not seen
        hidden = self.other(self.act(self.first(views)))
        return x + self.last(self.norm(hidden))


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[PartKey]]:
    """Of frames whose ops have made something again, the regions."""
    cost = NotingCost(seen_s=1e-5, noted_s=0.0, begun_s=0.0)
    monkeypatch.setattr("rockmate.frames.derivation.noting_cost", lambda: cost)
    derivations.cache_clear()
    found: list[frozenset[PartKey]] = []
    derive = Frame._derive

    def noted(self: Frame) -> None:
        assert self._taped is not None
        found.append(self._taped.tape.regions)
        derive(self)

    monkeypatch.setattr(Frame, "_derive", noted)
    return found


@pytest.mark.parametrize("change", ["nothing", "writes", "multiplies"])
def test_equal_to_eager_whatever_runs_between(
    change: str, derived: list[frozenset[PartKey]]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Block(), nn.Identity()) for _ in range(6)))
    plain = copy.deepcopy(model)
    module = RockmateModule(
        model, None, 0.6, mode="frames", on_infeasible="least", plan_frames=False
    )
    for seed in range(6):
        ours, expected = train(module, model, seed), train(plain, plain, seed)
        assert all(map(torch.equal, ours, expected))
    assert PartKey("act", 0) in frozenset().union(*derived)
    for each in (*model.modules(), *plain.modules()):
        if isinstance(each, Other):
            each.what = change
    for seed in range(6, 9):
        ours, expected = train(module, model, seed), train(plain, plain, seed)
        assert all(map(torch.equal, ours, expected))


def test_what_is_written_unseen_is_another_state() -> None:
    x = torch.randn(4, 4)
    tape = Tape("block", [storage_id(x)], time.perf_counter)
    with tape.observing():
        y = x.sin()
    first = tape.state_of(y)
    y.mul_(2)
    with tape.observing():
        z = y.cos()
    assert tape.state_of(y) != first
    assert not tape.can_make({tape.state_of(z)}, {})
    assert not tape.can_make({tape.state_of(y)}, {})
    assert tape.can_make({first}, {})
    held = {tape.state_of(y): Saved(y, (storage_id(y),), version_of(y))}
    assert torch.equal(tape.make({tape.state_of(z)}, held)[tape.state_of(z)], y.cos())
