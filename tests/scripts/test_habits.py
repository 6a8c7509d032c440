"""Scripts with a habit of their own, in each mode: what they log and train is eager's."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize
from twice import Numbers, Wrap, differences, wrapped

LATER = ("hook of all modules", "saved tensors moved")
OTHERS = ("parametrizations cached", "profiler", "hook that logs", "steps in the backward")


def trained(habit: str, wrap: Wrap) -> Numbers:
    parts = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    seen = list[float]()

    def log(module: nn.Module, _: Any, output: Any) -> None:
        seen.extend([float(output.detach().std())] * isinstance(module, nn.Linear))

    if habit == "parametrizations cached":
        parametrizations.weight_norm(parts[0][0])
    if habit == "hook that logs":
        parts[1][0].register_forward_hook(log)
    model = wrap(nn.Sequential(*parts))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for each in model.parameters() if habit == "steps in the backward" else ():
        own = torch.optim.SGD([each], 0.1)
        each.register_post_accumulate_grad_hook(lambda _, step=own.step: step())
    contexts: dict[str, Any] = {
        "parametrizations cached": parametrize.cached,
        "profiler": torch.profiler.profile,
        "hook of all modules": partial(register_module_forward_hook, log),
        "saved tensors moved": torch.autograd.graph.save_on_cpu,
    }
    for step in range(6):
        is_on = habit in contexts and (step > 1 or habit not in LATER)
        with contexts[habit]() if is_on else contextlib.nullcontext():
            model(torch.randn(24, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, parameters_to_vector(model.parameters())]


@pytest.mark.parametrize("mode", ["auto", "frames"])
@pytest.mark.parametrize("habit", [*LATER, *OTHERS])
def test_a_habit_changes_no_number(habit: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    wrap = partial(wrapped, mode=mode)
    assert not differences(partial(trained, habit), wrap)
    if (habit, mode) == ("saved tensors moved", "frames"):
        assert "more than the budget" in caplog.text
