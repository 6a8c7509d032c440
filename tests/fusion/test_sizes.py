"""Training with fused kernels on batches of many lengths: kernels for the first few sizes only."""

from __future__ import annotations

import copy
import logging

import models
import pytest
import torch
from fused_blocks import assert_trains_alike

import rockmate.fusion.rewrite
from rockmate import RockmateModule
from rockmate.capture.signature import CallSignature, flatten_call
from rockmate.entry.step_family import _advice_on_sizes

WARNING = "kernels have been compiled for"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of groups that each step asked kernels for."""
    asked: list[int] = []
    compiled_groups = rockmate.fusion.rewrite.compiled_groups

    def counted(wanted: list[object], **options: object) -> object:
        asked.append(len(wanted))
        return compiled_groups(wanted, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("rockmate.fusion.rewrite.compiled_groups", counted)
    return asked


def test_kernels_are_compiled_for_a_few_sizes_and_the_warning_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compilations: list[int]
) -> None:
    monkeypatch.setattr("rockmate.entry.step_family.MAX_FUSED_SIZES", 2)
    monkeypatch.setattr("rockmate.fusion.kernels.time_ms", lambda *_: 1.0)
    torch.manual_seed(0)
    model = models.Stack(num_layers=2, width=64).train()
    eager = copy.deepcopy(model)
    sizes = (64, 48, 56, 40, 24, 16, 48, 40, 64)
    module = RockmateModule(model, (torch.randn(sizes[0], 64),), 0.8, kernels="fused")
    kernels = []
    for rows in sizes:
        before = len(compilations)
        assert_trains_alike(module, eager, rows)
        kernels.append(module.plan.options.kernels)
        if rows in (40, 24, 16):
            assert len(compilations) == before, f"kernels were compiled for {rows} rows"
    assert kernels == [
        *("fused", "fused", "fused", "eager", "eager", "eager", "fused", "eager", "fused")
    ]
    assert compilations
    warnings = [record for record in caplog.records if WARNING in record.message]
    assert [record.levelno for record in warnings] == [logging.WARNING]
    assert "drop_last=True" in caplog.text


def test_the_warning_of_many_lengths_names_a_multiple() -> None:
    def call(batch: int, length: int) -> CallSignature:
        return flatten_call((torch.zeros(batch, length),), {})[1]

    lengths = _advice_on_sizes([call(4, 500), call(4, 100), call(2, 300)])
    assert "multiples of 64" in lengths
    assert "pad_to_multiple_of=64" in lengths
    assert "multiple" not in _advice_on_sizes([call(4, 500), call(2, 500), call(1, 500)])
