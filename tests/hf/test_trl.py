"""Trainers of TRL that compute losses themselves: numbers, metrics and weights of the plain run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fine_tuning import Record
from helpers import relative_error

from bench.measure import allocator_peak
from rockmate import PlannedStep, wrap_trainer

trainers = pytest.importorskip("trl_trainers")  # needs TRL, datasets and PEFT
pytestmark = pytest.mark.filterwarnings("ignore")  # of trainers


class Metrics(Record):
    """All that is logged but for times."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.logs.append({k: v for k, v in logs.items() if not k.endswith(("time", "second"))})


@pytest.mark.parametrize("kind", trainers.KINDS)
def test_trains_as_without_a_budget(kind: str, tmp_path: Path) -> None:
    found = []
    for budget in (None, 0.8):
        record = Metrics()
        made = trainers.trainer(kind, tmp_path, callbacks=[record])
        step = None if budget is None else wrap_trainer(made, budget)
        made.train()
        found.append((record.logs, made.model.state_dict()))
    assert step is not None
    assert step.is_planned  # or, where it is not what computes the loss, the model
    assert isinstance(step, PlannedStep) == (kind in ("ORPO", "GKD", "Reward"))
    assert len(found[0][0]) == 3
    for ours, reference in zip(found[1][0], found[0][0], strict=True):
        assert ours == pytest.approx(reference, rel=1e-3, abs=1e-5)
    for name, weight in found[0][1].items():
        assert relative_error(found[1][1][name], weight) < 1e-4


@pytest.mark.parametrize("adapters", ["", "new", "trained"])
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_reference_is_within_the_budget(kind: str, adapters: str, tmp_path: Path) -> None:
    peaks, found = [], []
    for budget in (None, 0.6):
        made = trainers.trainer(kind, tmp_path, adapters=adapters)
        policy = made.model
        if budget is not None:
            wrap_trainer(made, budget, trial="never")
        of_reference = [] if made.ref_model is None else [made.ref_model.lm_head.weight]
        of_reference += [each for name, each in policy.named_parameters() if "B.ref" in name]
        with torch.no_grad():  # it was the policy
            for weight in of_reference:
                weight.mul_(2)
        batch = made._prepare_inputs(next(iter(made.get_train_dataloader())))

        def step(made: Any = made, batch: Any = batch) -> None:
            made.compute_loss(made.model, dict(batch)).backward()

        step()
        policy.zero_grad(set_to_none=False)
        peaks.append(allocator_peak(step))
        found.append({n: each.grad for n, each in policy.named_parameters() if each.requires_grad})
    for name, grad in found[0].items():
        assert relative_error(found[1][name], grad) < 1e-5
    assert peaks[1] < 0.1 * peaks[0]  # of TRL's buffers, whatever the vocabulary


def test_reference_outside_of_the_budget_is_named(tmp_path: Path, caplog: Any) -> None:
    made = trainers.trainer("DPO", tmp_path)
    wrap_trainer(made, 0.8)
    made.ref_model.forward(torch.ones(2, 4, dtype=torch.int64), use_cache=False)
    assert "called on other inputs than the policy" in caplog.text
    wrap_trainer(trainers.trainer("GRPO", tmp_path), 0.8)
    assert "is not called by the loss" in caplog.text


def test_mixed_precision(tmp_path: Path) -> None:
    logs = []
    for wrap in (lambda made: made, lambda made: wrap_trainer(made, 0.8)):
        record = Metrics()
        made = trainers.trainer("DPO", tmp_path, callbacks=[record], bf16=True)
        wrap(made)
        made.train()
        logs.append([line["loss"] for line in record.logs])
    assert logs[1] == pytest.approx(logs[0], rel=1e-2)
