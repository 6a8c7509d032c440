"""Lower precision with a planned module.

Bf16 weights, autocast around the call, and a gradient scaler, all bit for bit.
"""

from __future__ import annotations

import logging

import pytest
import torch
from fine_tuning import batch, llama
from helpers import assert_trains_alike, differing
from torch import nn

from rockmate import RockmateModule


def loss_of(module: nn.Module, step: int) -> torch.Tensor:
    return module(**batch(step)).loss


def loss_under_autocast(module: nn.Module, step: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(module, step)


def test_autocast_around_the_call_though_the_sample_was_planned_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = [llama() for _ in range(2)]
    module = RockmateModule(models[0], batch(), 0.6)
    with caplog.at_level(logging.WARNING, logger="rockmate"):
        assert_trains_alike(module, models[1], loss_under_autocast, 2)
        lines = [record.message for record in caplog.records if record.name.startswith("rockmate")]
        assert len(lines) == 1
        assert "autocast" in lines[0]
        loss_of(module, 0).backward()  # the first plan is still there
    assert len([record for record in caplog.records if record.name.startswith("rockmate")]) == 1


def test_a_gradient_scaler() -> None:
    found = []
    for wrap in (False, True):
        model = llama()
        module = RockmateModule(model, budget=0.6) if wrap else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = module(**batch(step)).loss
            if step == 1:
                # an overflow: the step is left out and the scale is halved
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            losses.append(
                (loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            )
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((repr(losses), scaler.get_scale(), model.state_dict()))
    assert found[0][:2] == found[1][:2]
    assert found[0][1] == 2.0**9
    assert not differing(found[1][2], found[0][2])
