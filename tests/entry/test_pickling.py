"""Pickled modules, and copies whose plan cannot be copied: the plain model, with a warning."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers import assert_gradients_alike
from torch import Tensor, nn

from rockmate import Planner, RockmateModule


def planned() -> tuple[RockmateModule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return RockmateModule(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), x, 1.0), x


def test_pickle_gives_the_plain_model(caplog: pytest.LogCaptureFixture) -> None:
    module, x = planned()
    loaded = pickle.loads(pickle.dumps(module))
    assert "Sequential" in caplog.text
    assert type(loaded) is nn.Sequential
    assert torch.equal(loaded(x), module.original(x))


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_model_and_its_copy_may_change_before_the_first_step(is_frozen: bool) -> None:
    module, x = planned()
    module[0].weight.requires_grad_(not is_frozen)
    if not is_frozen:
        nn.utils.parametrizations.weight_norm(module[0])
    plain = copy.deepcopy(module.original)
    for each in (plain, copy.deepcopy(module), module):
        each(x).sum().backward()
        assert_gradients_alike(each, plain)


def test_a_copy_with_mode_auto_has_second_derivatives_as_the_module_has() -> None:
    module = RockmateModule(planned()[0].original, budget=1.0, mode="auto")
    x = torch.ones(4, 8, requires_grad=True)
    for each in (copy.deepcopy(module), module):
        torch.autograd.grad(each(x).sum(), x, create_graph=True)[0].sum().backward()


def test_a_copy_that_cannot_share_a_given_plan_is_the_plain_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The advice leads to a planned copy."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh())), torch.randn(4, 8)
    plan = Planner(model, x, untraced=["1"]).plan(1.0)
    module = RockmateModule(model, x, plan=plan)
    copied = copy.deepcopy(module)
    assert type(copied) is nn.Sequential
    assert not isinstance(vars(copied).get("_wrapped"), nn.Module)
    assert "Load the plan for the copy" in caplog.text
    planned_copy = RockmateModule(copied, x, plan=plan)
    assert torch.equal(planned_copy(x), module(x))
