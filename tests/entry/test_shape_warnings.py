"""Plans for other shapes: one warning a minute at most, however many shapes come."""

from __future__ import annotations

import logging

import pytest
import torch
from made_of import made_of
from torch import nn

from rockmate import RockmateModule, plan_cache


@made_of(lambda: {"layers": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))})
class _Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()


@pytest.mark.parametrize(("seconds", "num_warnings"), [(60.0, 1), (0.0, 3)])
def test_plans_for_larger_batches_warn_once_a_minute(
    seconds: float,
    num_warnings: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_cache, "SECONDS_BETWEEN_WARNINGS", seconds)
    module = RockmateModule(_Loss(), torch.zeros(2, 8), 10**6, machine="cpu-avx2")
    with caplog.at_level(logging.INFO, logger="rockmate"):
        for num_rows in (3, 4, 5):
            module(torch.ones(num_rows, 8)).backward()
    lines = [each for each in caplog.records if each.getMessage().startswith("planned for this")]
    assert len(lines) == 3
    assert sum(each.levelno == logging.WARNING for each in lines) == num_warnings
