"""Scripts with a habit of their own, in each mode: what they log and train is eager's."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from twice import Numbers, Wrap, differences, wrapped

from rockmate._torch.engine import is_profiling

HOOKS = ("hook that logs", "hook of all modules", "steps in the backward")
WITHIN = {"parametrizations cached": parametrize.cached, "profiler": torch.profiler.profile}


class Blocks(nn.ModuleList):
    has_checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for each in self:
            x = checkpoint(each, x, use_reentrant=False) if self.has_checkpoints else each(x)
        return x


def trained(habit: str, wrap: Wrap) -> Numbers:
    parts = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
    plain, seen = Blocks(parts), list[float]()

    def log(module: nn.Module, _: Any, output: Any) -> None:
        seen.extend([float(output.detach().std())] * isinstance(module, nn.Linear))

    if habit == "parametrizations cached":
        parametrizations.weight_norm(plain[0][0])  # pyright: ignore
    if habit == "hook that logs":
        plain[1][0].register_forward_hook(log)  # pyright: ignore
    model = wrap(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for each in model.parameters() if habit == "steps in the backward" else ():
        own = torch.optim.SGD([each], 0.1)
        each.register_post_accumulate_grad_hook(lambda _, step=own.step: step())
    for step in range(8 if habit == "checkpoints later" else 4):
        plain.has_checkpoints = habit == "checkpoints later" and step > 1
        is_hooked = habit == "hook of all modules" and step > 1
        hook = register_module_forward_hook(log) if is_hooked else contextlib.nullcontext()
        with WITHIN.get(habit, contextlib.nullcontext)(), hook:
            model(torch.randn(24, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not is_profiling()
    return [*seen, torch.nn.utils.parameters_to_vector(model.parameters())]


@pytest.mark.parametrize("mode", ["auto", "frames"])
@pytest.mark.parametrize("habit", [*WITHIN, *HOOKS])
def test_a_habit_changes_no_number(habit: str, mode: str) -> None:
    wrap = partial(wrapped, mode=mode)
    assert not differences(partial(trained, habit), wrap, zeroes_last=True)


def test_a_budget_that_frames_keep_no_longer_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    trained("checkpoints later", partial(wrapped, mode="frames"))
    assert "more than the budget" in caplog.text
