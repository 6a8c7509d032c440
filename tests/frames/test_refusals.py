"""Every refusal of a capture ends in the line that works, and that line works."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_alike
from made_of import made_of, mlp
from torch import Tensor, nn

from rockmate import Planner, RockmateModule
from rockmate.errors import FRAMES_ADVICE, RockmateError, UnsupportedModelError, advise_frames


@made_of(lambda function: {"body": mlp(32, 128), "function": function})
class Block(nn.Module):
    """A block of layers, with something that has no static graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.body(x))


def _branch(x: Tensor) -> Tensor:
    return x.cos() if x.mean() > 0 else x.sin()


def _masked(x: Tensor) -> Tensor:
    return x * x[x > 0].mean()


def _number(x: Tensor) -> Tensor:
    return x * x.detach().abs().max().item()


def _solved(x: Tensor) -> Tensor:
    return torch.linalg.solve(torch.eye(32) * 2, x.t()).t()


def _unique(x: Tensor) -> Tensor:
    return x * x.detach().sign().unique().numel()


def _loop(x: Tensor) -> Tensor:
    while x.detach().norm() > 1:
        x = x / 2
    return x


FUNCTIONS = [_branch, _masked, _number, _solved, _unique, _loop]


def model_of(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(function) for _ in range(6)))


def gradients(module: Any, model: nn.Module) -> list[Tensor]:
    for seed in range(4):
        model.zero_grad()
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        module(x).square().mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_last_line_of_a_refusal_works(function: Callable[[Tensor], Tensor]) -> None:
    model = model_of(function)
    sample = torch.randn(64, 32)
    texts = []
    for refused in (lambda: RockmateModule(model, sample, 0.5), lambda: Planner(model, sample)):
        with pytest.raises(UnsupportedModelError) as caught:
            refused()
        texts.append(str(caught.value))
    for text in texts:
        assert text.endswith(FRAMES_ADVICE)
        assert text.count(FRAMES_ADVICE) == 1
    line = re.findall(r"RockmateModule\(.*\)", texts[0])[-1]
    plain = copy.deepcopy(model)
    module = eval(line, {"RockmateModule": RockmateModule, "model": model, "budget": 0.7})
    assert_alike(gradients(module, model), gradients(plain, plain))


def test_a_first_call_is_refused_with_the_same_line() -> None:
    module = RockmateModule(model_of(_branch), None, 0.5)
    with pytest.raises(UnsupportedModelError) as caught:
        module(torch.randn(64, 32))
    assert str(caught.value).endswith(FRAMES_ADVICE)


def test_the_line_is_said_once() -> None:
    error = RockmateError("no.")
    advise_frames(error)
    advise_frames(error)
    assert str(error) == f"no. {FRAMES_ADVICE}"
