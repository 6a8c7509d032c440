"""A model that has been through `torch.compile` is planned as the model that it holds."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from dynamo_networks import Network, batch
from helpers import differing, gradients_of, same_bits
from torch import Tensor, fx, nn

from rockmate import Plan, Planner, RockmateModule

# Dynamo reads `.grad` of each input and hides the warning, which is an error in tests.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
WAYS = ("whole", "in place", "submodules")


class Counter:
    """A backend that counts the calls of compiled code."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.num_calls += 1
            return graph(*arguments)

        return run


def compiled(model: nn.Module, way: str, backend: Any) -> Any:
    torch.compiler.reset()
    if way == "whole":
        return torch.compile(model, backend=backend)
    if way == "in place":
        model.compile(backend=backend)
        return model
    blocks: Any = model.blocks
    blocks[1] = torch.compile(blocks[1], backend=backend)
    blocks[2].compile(backend=backend)
    return model


def step(call: Callable[..., Tensor], seed: int) -> Tensor:
    torch.manual_seed(seed)
    loss = call(batch(64, seed))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["plan", "frames"])
def test_training_is_eagers_and_eval_runs_compiled(
    way: str, mode: Literal["plan", "frames"]
) -> None:
    plain, counter = Network(), Counter()
    eager = copy.deepcopy(plain)
    model = compiled(plain, way, counter)
    module = RockmateModule(model, batch(64), 0.7, mode=mode)
    for seed in range(4):
        assert same_bits(step(module, seed), step(eager, seed))
    assert list(gradients_of(model).values()) != []
    assert all(map(same_bits, gradients_of(model).values(), gradients_of(eager).values()))
    assert all(map(same_bits, model.state_dict().values(), eager.state_dict().values()))
    assert counter.num_calls == 0
    module.eval()
    eager.eval()
    assert same_bits(module(batch(64)), eager(batch(64)))
    assert counter.num_calls > 0


@pytest.mark.parametrize("way", WAYS)
def test_names_are_those_of_the_object_that_was_given(way: str) -> None:
    plain = Network()
    model = compiled(plain, way, "eager")
    keys = list(model.state_dict())
    module = RockmateModule(model, batch(64), 0.7)
    assert list(module.state_dict()) == keys
    assert [name for name, _ in module.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert any("_orig_mod." in key for key in keys) == (way != "in place")
    module.load_state_dict({key: torch.zeros_like(v) for key, v in module.state_dict().items()})
    assert not any(parameter.any() for parameter in plain.parameters())
    assert module.original is model


def test_attributes_reach_the_model_that_was_compiled() -> None:
    plain = Network()
    module = RockmateModule(torch.compile(plain, backend="eager"), batch(64), 0.7)
    module.break_at = 2
    module.note = "new"
    assert (plain.break_at, plain.note) == (2, "new")
    module.eval()
    assert not plain.training
    twin = copy.deepcopy(module)
    twin.train()
    step(twin, 0)
    assert not plain.training
    assert twin.blocks[0].linear.weight.grad is not None
    assert plain.blocks[0].linear.weight.grad is None


def test_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.compile(Network(), backend="eager")
    with caplog.at_level(logging.WARNING):
        planner = Planner(model, batch(64))  # pyright: ignore[reportArgumentType]
        planner.module(0.7)
        RockmateModule(model, batch(64), 0.7)  # pyright: ignore[reportArgumentType]
    lines = [each for each in caplog.messages if "been through torch.compile" in each]
    assert len(lines) == 1
    assert "the Network" in lines[0]


def test_a_plan_serves_the_model_compiled_or_not(tmp_path: Path) -> None:
    plain = Network()
    planner = Planner(torch.compile(plain, backend="eager"), batch(64))  # pyright: ignore
    path = tmp_path / "plan.json"
    planner.plan(0.7).save(path)
    eager = copy.deepcopy(plain)
    for model in (plain, torch.compile(plain, backend="eager")):
        module = RockmateModule(model, batch(64), plan=Plan.load(path))  # pyright: ignore
        plain.zero_grad()
        eager.zero_grad()
        assert same_bits(step(module, 1), step(eager, 1))
        assert differing(gradients_of(plain), gradients_of(eager)) == []


def test_an_opaque_submodule_may_be_compiled() -> None:
    plain = Network()
    eager = copy.deepcopy(plain)
    counter = Counter()
    plain.blocks[1].compile(backend=counter)
    module = RockmateModule(plain, batch(64), 0.9, untraced=["blocks.1"])
    for seed in range(2):
        assert same_bits(step(module, seed), step(eager, seed))
    assert differing(gradients_of(plain), gradients_of(eager)) == []
    assert counter.num_calls == 0
