"""Outputs that the loss leaves out: gradients, hooks and memory are eager's."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from helpers import assert_alike, same_gradients
from made_of import made_of
from torch import Tensor, nn

from rockmate import Planner, RockmateModule
from rockmate._torch.allocator import timeline


class Heads(nn.Module):
    """Four outputs of one trunk. Two are halves of one value, one gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.first, self.second = nn.Linear(16, 8), nn.Linear(16, 8)
        self.both = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.trunk(x)
        mean, scale = self.both(h).chunk(2, -1)
        return self.first(h), torch.log(self.second(h) * 0), mean.sin(), (scale * 1000).exp()


def batch(rows: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make()


def backward(module: nn.Module, x: Tensor, used: Sequence[int]) -> None:
    outputs = module(x)
    sum((outputs[index].sum() for index in used), torch.zeros(())).backward()


SUBSETS = [used for size in (1, 2, 3, 4) for used in combinations(range(4), size)]


@pytest.mark.parametrize("budget", ["minimum", 1.0])
def test_gradients_are_eagers_for_every_set_of_used_outputs(budget: str | float) -> None:
    model, reference = seeded(Heads), seeded(Heads)
    planner = Planner(model, batch(), machine="cpu-avx2")
    module = planner.module(planner.minimum_peak_bytes if budget == "minimum" else budget)

    def both(callee: nn.Module, used: Sequence[int]) -> None:
        backward(callee, batch(), used)
        backward(callee, batch(seed=1), used)

    for used in SUBSETS:
        same_gradients(module, reference, partial(both, used=used))


class Signs(nn.Module):
    """The sign of a value has a gradient of zeros, which autograd makes from no other gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        return self.last(torch.copysign(y, x * self.scale + self.last(y)).sin()).sum()


@pytest.mark.parametrize("strategy", ["chen", "rotor", "checkmate", "rockmate"])
def test_gradients_that_depend_on_no_tangent_are_delivered(strategy: str) -> None:
    model, reference = seeded(Signs), seeded(Signs)
    x = torch.randn(6, 8)
    planner = Planner(model, x, machine="cpu-avx2")
    module = planner.module(1.0, strategy=strategy)
    same_gradients(module, reference, lambda callee: callee(x).backward())
    assert model.scale.grad is not None


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_fire_where_eagers_do(kind: str) -> None:
    models = [seeded(Heads), seeded(Heads)]
    callees = [RockmateModule(models[0], batch(), 1.0, machine="cpu-avx2"), models[1]]
    fired: list[list[str]] = [[], []]
    for model, calls in zip(models, fired, strict=True):
        for name, parameter in model.named_parameters():
            getattr(parameter, kind)(lambda _, name=name, calls=calls: calls.append(name))
    for used in SUBSETS:
        for callee, calls in zip(callees, fired, strict=True):
            calls.clear()
            backward(callee, batch(), used)
        assert sorted(fired[0]) == sorted(fired[1])


def test_a_hook_of_a_later_time_leaves_an_undefined_gradient() -> None:
    """Such a hook waits for the end of the step, where the engine visits all parameters."""
    model = seeded(Heads)
    outputs = RockmateModule(model, batch(), 1.0, machine="cpu-avx2")(batch())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    outputs[0].sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith(("trunk", "first"))


def test_other_sizes_have_their_own_zeros(caplog: pytest.LogCaptureFixture) -> None:
    """The batches in between run the code of the symbolic capture."""
    model, reference = seeded(Heads), seeded(Heads)
    module = RockmateModule(model, batch(48), 1.0, machine="cpu-avx2")
    caplog.set_level(logging.INFO, logger="rockmate.entry.step_family")
    for rows in (48, 31, 17, 23, 1):
        same_gradients(module, reference, partial(backward, x=batch(rows), used=(2,)))
        assert model.both.weight.grad[8:].count_nonzero() == 0
    assert "symbolic sizes" in caplog.text


def test_returned_gradients_are_undefined_where_eagers_are() -> None:
    model, reference = seeded(Heads), seeded(Heads)
    module = RockmateModule(model, batch(), 1.0, gradients="returned", machine="cpu-avx2")
    found = [
        torch.autograd.grad(callee(batch())[2].sum(), list(owner.parameters()), allow_unused=True)
        for callee, owner in ((module, model), (reference, reference))
    ]
    assert_alike(*found)


def test_an_input_behind_an_unused_output_gets_no_gradient() -> None:
    @made_of(lambda: {"left": nn.Linear(8, 8), "right": nn.Linear(8, 8)})
    class TwoTowers(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(y).sin()

    model = seeded(TwoTowers)
    x, y = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    module = RockmateModule(model, (x, y), 1.0, machine="cpu-avx2")
    module(x, y)[0].sum().backward()
    assert x.grad is not None
    assert y.grad is None
    assert model.right.weight.grad is None


class RandomHeads(nn.Module):
    """A random graph of layers, sums, splits and concatenations with several outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.calls = [
            (draw.choice(("layer", "add", "cat", "norm", "view")), draw.random(), draw.random())
            for _ in range(draw.randint(5, 12))
        ]
        self.num_outputs = draw.randint(2, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [self.layers[0](x)]
        for op, *places in self.calls:
            left, right = (values[int(place * len(values))] for place in places)
            if op == "layer":
                values.append(self.layers[int(places[1] * 4)](left).tanh())
            elif op == "add":
                values.append(left + right * 0.5)
            elif op == "cat":
                values.append(torch.cat([left[:, 16:], right.exp()[:, :16]], 1))
            elif op == "norm":
                values.append(nn.functional.layer_norm(left, (32,)))
            else:
                values.append(left.view(-1, 4, 8).transpose(1, 2).reshape(-1, 32))
        return values[-self.num_outputs :]


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_with_outputs_left_out(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = RandomHeads(seed), torch.randn(64, 32)
    reference = copy.deepcopy(model)
    planner = Planner(model, x, machine="cpu-avx2")
    for budget in (planner.minimum_peak_bytes, 1.0):
        module = planner.module(budget)
        for size in range(1, model.num_outputs):
            for used in combinations(range(model.num_outputs), size):
                run = partial(backward, x=x, used=used)
                same_gradients(module, reference, run)


@pytest.mark.parametrize("seed", range(6))
def test_a_step_with_outputs_left_out_stays_inside_its_budget(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = RandomHeads(seed), torch.randn(2048, 32)
    planner = Planner(model, x, machine="cpu-avx2")
    module = planner.module(planner.minimum_peak_bytes)
    for used in combinations(range(model.num_outputs), 1):
        backward(module, x, range(model.num_outputs))
        model.zero_grad(set_to_none=False)
        peak = timeline(lambda used=used: backward(module, x, used)).peak_bytes
        assert peak <= module.plan.budget_bytes
