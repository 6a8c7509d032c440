"""A module that is planned where it stands stays what it is, and trains as in eager."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from made_of import mlp
from torch import nn

import rockmate
from rockmate._torch.members import compiled_call


class Net(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [mlp(16, 64, nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    return Net(*blocks)


def trained(model: nn.Module) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(3):
        batch = torch.randn(32, 16)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_and_weights_are_those_of_eager_within_the_budget() -> None:
    eager, model = net(), net()
    planned = rockmate.plan_in_place(model, budget=0.5)
    assert trained(model) == trained(eager)
    assert planned.plan.predicted_peak_bytes <= 0.5 * planned.plan.baseline_peak_bytes
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_object_stays_what_it_is() -> None:
    model = net()
    keys, modules, attributes = list(model.state_dict()), list(model.modules()), {*dir(model)}
    rockmate.plan_in_place(model, torch.randn(32, 16), 0.5)
    assert type(model) is Net
    assert list(model.state_dict()) == keys
    assert list(model.modules()) == modules
    assert {*dir(model)} == attributes
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert all(compiled_call(each) is None for each in copies)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 16)), copies[0].eval()(torch.ones(2, 16)))


def test_a_released_model_runs_as_before() -> None:
    model = net()
    with pytest.raises(rockmate.InvalidArgumentError, match="nothing to release"):
        rockmate.release(model)
    planned = rockmate.plan_in_place(model, budget=0.5)
    rockmate.release(model)
    assert compiled_call(model) is None
    trained(model)
    assert not planned.is_planned


def test_a_model_is_planned_once() -> None:
    model = net()
    rockmate.plan_in_place(model[0], budget=0.5)
    for plan in (rockmate.plan_in_place, rockmate.RockmateModule):
        with pytest.raises(rockmate.InvalidArgumentError, match="planned in place already"):
            plan(model, budget=0.5)
        with pytest.raises(rockmate.InvalidArgumentError, match=r"planned already.*\.original"):
            plan(nn.Sequential(rockmate.RockmateModule(net(), budget=0.5)), budget=0.5)
    with pytest.raises(rockmate.InvalidArgumentError, match="methods"):
        rockmate.plan_in_place(net(), budget=0.5, methods=["encode"])


def test_a_replaced_forward_is_planned_anew() -> None:
    eager, model = net(), net()
    rockmate.plan_in_place(model, budget=0.5)
    trained(model)
    trained(eager)
    for each in (eager, model):
        each.forward = lambda x, forward=each.forward: 2 * forward(x)  # pyright: ignore
    assert trained(model) == trained(eager)


@pytest.mark.parametrize("is_compiled_first", [True, False])
def test_eval_calls_of_a_compiled_model_run_its_code(is_compiled_first: bool) -> None:
    model, calls = net(), list[int]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        calls.append(1)
        return graph.forward

    if is_compiled_first:
        model.compile(backend=backend)
    planned = rockmate.plan_in_place(model, budget=0.5)
    if not is_compiled_first:
        model.compile(backend=backend)
    assert trained(model) == trained(net())
    assert planned.is_planned
    assert not calls
    model.eval()(torch.ones(2, 16))
    assert calls
