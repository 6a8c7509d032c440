"""What the first steps of a plan take is measured, told, and planned for where it is too much."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from made_of import made_of, mlp
from torch import Tensor, nn

from rockmate import RockmateModule, timeline
from rockmate._torch.allocator import Recording, Stretch
from rockmate.trial import evidence

WIDTH, ROWS = 32, 256


class Greedy(Recording):
    """Of a device that takes so many bytes more than is promised, wherever the peak is."""

    more_bytes = 0

    def stop(self) -> list[Stretch]:
        found = super().stop()
        return [Stretch(each.begin_bytes, each.peak_bytes + self.more_bytes) for each in found]


class Loss(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def blocks_of(number: int) -> list[nn.Module]:
    return [mlp(WIDTH, 8 * WIDTH) for _ in range(number)]


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> type[Greedy]:
    monkeypatch.setattr(evidence, "Recording", Greedy)
    monkeypatch.setattr(Greedy, "more_bytes", 0)
    return Greedy


def module_of(budget: Any, **options: Any) -> RockmateModule:
    return RockmateModule(Loss(*blocks_of(6)), torch.randn(ROWS, WIDTH), budget, **options)


def train(module: nn.Module, num_steps: int) -> int:
    """The peak of the last step, of which gradients are in place."""
    x = torch.randn(ROWS, WIDTH)
    for _ in range(num_steps - 1):
        module(x).backward()
        module.zero_grad()
    module(x).backward()
    module.zero_grad(set_to_none=False)
    return timeline(lambda: module(x).backward()).peak_bytes


def lines_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if text in each.getMessage()]


def test_one_line_has_the_peak_that_the_allocator_sees(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rockmate")
    module = module_of(0.5)
    seen_bytes = train(module, 8)
    found, plan = module._plans.runnables[0].evidence, module.plan
    assert found is not None
    assert found.peak_bytes == seen_bytes <= plan.predicted_peak_bytes
    (line,) = lines_of(caplog, "the first steps of the plan")
    assert f"predicted {plan.predicted_ms:.1f} ms" in line
    assert f"of {plan.baseline_ms:.1f} ms, the predicted time without recomputation" in line


def test_a_step_under_a_profiler_is_followed_by_one_that_is_recorded() -> None:
    module, x = module_of(0.7, trial="never"), torch.randn(ROWS, WIDTH)
    module(x).backward()
    found = module._plans.runnables[0].evidence
    assert found is not None
    with torch.profiler.profile():
        module(x).backward()
    assert not found.peak_bytes
    module(x).backward()
    assert found.peak_bytes


@pytest.mark.parametrize("budget", [0.7, "1900KiB"])
def test_what_passes_the_budget_leads_to_a_smaller_plan(
    caplog: pytest.LogCaptureFixture, greedy: type[Greedy], budget: Any
) -> None:
    module = module_of(budget)
    before = module.plan
    greedy.more_bytes = before.budget_bytes // 4
    train(module, 8)
    less_bytes = before.budget_bytes - module.plan.budget_bytes
    assert before.predicted_peak_bytes + greedy.more_bytes - before.budget_bytes <= less_bytes
    assert less_bytes <= greedy.more_bytes
    (line,) = lines_of(caplog, "plans leave room for it")
    assert "a step has taken" in line
    assert "more than predicted" in line


@pytest.mark.parametrize("options", [{"replan": False}, {}, {"on_infeasible": "least"}])
def test_where_no_plan_leaves_room_a_warning_says_so(
    caplog: pytest.LogCaptureFixture, greedy: type[Greedy], options: dict[str, Any]
) -> None:
    module = module_of(0.7, **options)
    before = module.plan
    greedy.more_bytes = before.budget_bytes
    train(module, 8)
    assert (module.plan is before) == ("on_infeasible" not in options)
    (line,) = lines_of(caplog, "The budget is passed.")
    assert ("leaves" in line) == ("Give one" not in line) == ("replan" not in options)


@made_of(lambda: {"lines": []})
class Heard(logging.Handler):
    """Keeps the lines of a script's log."""

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


HEARD = Heard()


@pytest.mark.parametrize("mode", ["plan", "frames"])
def test_what_a_script_hears_of_trials_is_no_difference(mode: Any) -> None:
    log = logging.getLogger("rockmate")
    level = log.level
    log.addHandler(HEARD)
    log.setLevel(logging.DEBUG)
    try:
        module = RockmateModule(Loss(*blocks_of(4)), torch.randn(ROWS, WIDTH), 0.9, mode=mode)
        for _ in range(3):  # losses outside, so that trials say what they leave out
            (2 * module(torch.randn(ROWS, WIDTH))).backward()
    finally:
        log.removeHandler(HEARD)
        log.setLevel(level)
    assert any("not compared" in line for line in HEARD.lines)
