"""The check of random marks: it passes on plans, and finds each fault that is put into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn

import rockmate
from bench import marks as bench_marks

MARKS = {"hidden": "recompute", "aten.sigmoid": "save"}


@made_of(lambda: {"first": nn.Linear(8, 64), "last": nn.Linear(64, 1)})
class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = rockmate.name(torch.tanh(self.first(x)), "hidden")
        return self.last(torch.sigmoid(hidden).exp()).square().mean()


def content() -> dict[str, Any]:
    planner = rockmate.Planner(Net(), torch.randn(16, 8), machine="cpu-avx2", marks=MARKS)
    return json.loads(planner.plan(1.0).to_text())


def test_random_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path / "marks")]
    for first in ("3", "5"):
        assert bench_marks.main(["--first", first, "--num", "2", *output]) == 0
    capsys.readouterr()
    assert bench_marks.main(["--page", *output]) == 0
    printed = capsys.readouterr().out
    assert "| 4 of 4 |  | hit |" in printed
    assert "| models | 4 |" in printed


def test_a_plan_has_no_fault() -> None:
    assert bench_marks.faults(content(), MARKS) == []


def test_each_fault_is_found() -> None:
    good = content()
    again = next(line for line in good["schedule"] if "again" in line)
    without = [line for line in good["schedule"] if line is not again]
    twice = [*good["schedule"], "backward 2 sigmoid again"]
    changes = {
        "read as it was saved": {"schedule": without},
        "runs again": {"schedule": twice},
        "ms, not": {"predicted_ms": 2 * good["predicted_ms"]},
        "the bound": {"lower_bound_ms": 2 * good["predicted_ms"]},
        "above the budget": {"budget_bytes": good["predicted_peak_bytes"] - 1},
    }
    for text, change in changes.items():
        assert any(text in fault for fault in bench_marks.faults({**good, **change}, MARKS)), text
    assert any("not asked for" in each for each in bench_marks.faults(good, {"hidden": "save"}))
