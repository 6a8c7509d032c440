"""Parts of frames that are given up and made again by themselves: as eager, bit for bit."""

from __future__ import annotations

import copy
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rockmate import RockmateModule
from rockmate._torch.allocator import timeline
from rockmate.errors import InfeasibleMemoryLimitError
from rockmate.frames.frame import Frame
from rockmate.frames.menu import FrameProfile, Offer, PartKey, _with, menu

pytestmark = pytest.mark.model

ROWS, WIDTH = 96, 48


class Wide(nn.Module):
    """Cheap elementwise functions between products: much is saved that takes little time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else nn.LayerNorm(WIDTH)
        self.first, self.last = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(6 * WIDTH, WIDTH)
        self.act, self.drop = Curve(kind), nn.Dropout(0.3)
        self.twice = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.slow(self.norm(x)))
        if self.kind == "in place":
            y.mul_(0.5)
        y = self.last(self.drop(y))
        if self.kind == "chance" and torch.rand(()) < 0.5:
            y = self.act(y)
        if self.kind == "views":
            y = y + self.twice(self.act(y.t()).t().contiguous()).t().flip(0).t()
        return x + self.twice(self.twice(y))

    def slow(self, x: Tensor) -> Tensor:
        end = time.thread_time() + 0.003  # as a large product, which takes time and saves little
        while time.thread_time() < end:
            pass
        return self.first(x)


class Curve(nn.Module):
    """An activation of several steps, with a state of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_calls = kind, 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.kind == "state":
            self.mean.lerp_(x.detach().mean(), 0.1)
        noise = torch.rand_like(x) if self.kind == "noise" else 0.5
        return x.pow(3).tanh() * x.square() * noise + (x - self.mean).relu() / self.num_calls


def model_of(kind: str) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(Wide(kind), nn.Identity()) for _ in range(6)))


def train(module: nn.Module, model: nn.Module, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = module(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    gradients = [each.grad for each in model.parameters()]
    buffers = [each.clone() for each in model.buffers()]
    counters = [each.num_calls for each in model.modules() if isinstance(each, Curve)]
    return [
        loss.detach(),
        *gradients,
        *buffers,
        torch.get_rng_state(),
        *map(torch.tensor, counters),
    ]


def assert_same(ours: list[Any], expected: list[Any]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.fixture
def parts_made_again(monkeypatch: pytest.MonkeyPatch) -> Counter[PartKey | None]:
    """Counts the second runs of parts, and of whole frames under None; no single ops run again."""
    monkeypatch.setattr("rockmate.frames.menu.derivations", lambda *_: ())
    found: Counter[PartKey | None] = Counter()
    made_by = Frame._made_by

    def counted(self: Frame, call: Any, first: int, slots: Any, *, results_of: Any) -> Any:
        inner = call.key.path.removeprefix(self.key.path).strip(".")
        found[PartKey(inner, call.key.number) if inner else None] += 1
        return made_by(self, call, first, slots, results_of=results_of)

    monkeypatch.setattr(Frame, "_made_by", counted)
    return found


def any_parts(profile: FrameProfile) -> tuple[Offer, ...]:
    """Offers of one more part each, in some order, all of them cheap."""
    draw = random.Random(len(profile.storages))
    offers = [profile.offer(frozenset())]
    for key in draw.sample(sorted(profile.able_parts()), len(profile.able_parts())):
        before = offers[-1].parts
        offer = profile.offer(_with(profile, before, key))
        is_more = profile.slots_of(before) <= profile.slots_of(offer.parts)
        if is_more and offer.num_bytes > offers[-1].num_bytes:
            offers.append(offer)
    return (*(replace(each, seconds=0.0) for each in offers[1:]), menu(profile)[-1])


KINDS = ["plain", "norm", "in place", "chance", "views", "state", "noise"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_eager_at_every_budget(
    kind: str, parts_made_again: Counter[PartKey | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measured times of so small a model would choose whole frames.
    monkeypatch.setattr("rockmate.frames.menus.menu", any_parts)
    monkeypatch.setattr("rockmate.frames.menus.choices", any_parts)
    for budget in (0.9, 0.75, 0.6, 0.45, 0.3):
        model = model_of(kind)
        plain = copy.deepcopy(model)
        module = RockmateModule(model, None, budget, mode="frames", on_infeasible="least")
        for seed in range(8):
            assert_same(train(module, model, seed), train(plain, plain, seed))
    del parts_made_again[None]
    assert sum(parts_made_again.values()) >= 6


@pytest.mark.parametrize("budget", [0.8, 0.6, 0.4])
def test_the_peak_is_within_the_budget_whatever_is_given_up(budget: float) -> None:
    model = model_of("plain")
    module = RockmateModule(model, None, budget, mode="frames", on_infeasible="least")
    for seed in range(6):
        train(module, model, seed)
    model.zero_grad(set_to_none=False)
    x = torch.randn(ROWS, WIDTH)
    measured = timeline(lambda: module(x).square().mean().backward()).peak_bytes
    assert module.frames is not None
    assert module.frames.budget_bytes is not None
    assert measured <= 1.01 * module.frames.budget_bytes


def test_parts_take_less_time_than_whole_frames(parts_made_again: Counter[PartKey | None]) -> None:
    """Little is short: the cheap activations alone are made again."""
    model = model_of("plain")
    module = RockmateModule(model, None, 0.8, mode="frames")
    for seed in range(5):
        train(module, model, seed)
    parts_made_again.clear()
    train(module, model, 6)
    assert parts_made_again
    assert set(parts_made_again) <= {PartKey("act", 0), PartKey("norm", 0), PartKey("drop", 0)}


def test_an_input_of_a_part_that_changes_after_it_is_no_part(
    parts_made_again: Counter[PartKey | None],
) -> None:
    class Late(Wide):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.slow(self.norm(x))
            y = self.act(hidden * 1.0)
            return x + self.last(self.drop(self.act(y.clamp_(-1, 1)).mul_(2.0)))

    model = nn.Sequential(*(nn.Sequential(Late("plain"), nn.Identity()) for _ in range(6)))
    plain = copy.deepcopy(model)
    module = RockmateModule(model, None, 0.6, mode="frames", on_infeasible="least")
    for seed in range(5):
        assert_same(train(module, model, seed), train(plain, plain, seed))
    assert parts_made_again


def test_a_memory_limit_becomes_a_budget_at_the_first_call() -> None:
    model = model_of("plain")
    module = RockmateModule(model, None, memory_limit="20GiB", optimizer="sgd", mode="frames")
    assert module.frames is not None
    for seed in range(2):
        train(module, model, seed)
    assert module.frames.budget_bytes is not None
    assert 10 << 30 < module.frames.budget_bytes < 20 << 30
    small = RockmateModule(model, None, memory_limit="1MiB", mode="frames")
    with pytest.raises(InfeasibleMemoryLimitError, match=r"1\.0 MiB"):
        train(small, model, 0)


_CAPPED = """
import copy, resource, sys, torch
from torch import nn
from rockmate import RockmateModule

torch.set_num_threads(1)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 1024), nn.Tanh(), nn.Dropout(), nn.Linear(1024, 64)
        )
    def forward(self, x):
        return x + self.layers(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
    def forward(self, x):
        for block in self.blocks:
            if torch.rand(()) < 0.9:
                x = block(x)
        return x.square().mean()

torch.manual_seed(0)
plain = Model()
model = copy.deepcopy(plain)
module = RockmateModule(model, None, "4GiB", mode="frames")

def step(module, model, seed):
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = module(torch.randn(int(torch.randint(1000, 2000, ())), 64))
    loss.backward()
    gradients = [each.grad for each in model.parameters()]
    return [loss.item(), *(torch.empty(0) if each is None else each for each in gradients)]

def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))

module(torch.randn(2000, 64)).backward()
module.frames.end_recording()
expected = [step(plain, plain, seed) for seed in range(STEPS)]
step(module, model, 0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (70 << 20), -1))
num_lost = 0
for seed in range(STEPS):
    try:
        step(plain, plain, seed)
    except RuntimeError as error:
        assert "allocate memory" in str(error), error
        num_lost += 1
num_recovered = 0
for seed in range(STEPS):
    assert same(step(module, model, seed), expected[seed]), seed
    num_recovered += module.frames.counts.num_dropped > 0
print(num_lost, num_recovered)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs a limit of the system")
@pytest.mark.parametrize("num_steps", [12, 100])
def test_random_steps_of_a_capped_process_recover_from_out_of_memory(num_steps: int) -> None:
    script = _CAPPED.replace("STEPS", str(num_steps))
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is free is given back at once
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    num_lost, num_recovered = map(int, finished.stdout.split())
    assert num_lost > num_steps / 2
    assert num_recovered > num_steps / 2
