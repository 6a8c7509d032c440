"""Proved optima: between the lower bound and the plan."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from bench import optima
from bench.machine import machine_record
from bench.unet import UNet


def test_what_is_proved_is_between_bound_and_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = UNet(num_levels=1, base_width=4, classes=2).train()
    small = SimpleNamespace(model=model, sample=torch.zeros(1, 3, 16, 16))
    monkeypatch.setattr(optima, "net", lambda _: small)
    (found,) = optima.measured("unet-1", Namespace(above=[1.4], limit=30.0))
    assert found["is_optimum"]
    assert 1 < found["bound"] <= found["proved"] + 1e-9
    assert found["plan"] == pytest.approx(found["proved"], abs=1e-9), "the search finds it"
    found |= machine_record("bench.optima")
    slower = found | {"above": 1.0, "plan": found["proved"] + 0.03}
    text = "\n".join(optima.page([found, slower]))
    assert "; the others take at most 3.0% of a step more" in text
