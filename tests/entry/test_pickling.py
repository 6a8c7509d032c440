"""Pickled modules: the plain model, with a warning."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing, nn

from rockmate import RockmateModule


def planned() -> tuple[RockmateModule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return RockmateModule(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), x, 1.0), x


def test_pickle_gives_the_plain_model(caplog: pytest.LogCaptureFixture) -> None:
    module, x = planned()
    loaded = pickle.loads(pickle.dumps(module))
    assert "Sequential" in caplog.text
    assert type(loaded) is nn.Sequential
    assert torch.equal(loaded(x), module.original(x))


def test_torch_save_gives_the_plain_model() -> None:
    module, x = planned()
    file = io.BytesIO()
    torch.save({"model": module, "step": 3}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["model"]
    assert type(loaded) is nn.Sequential
    assert torch.equal(loaded(x), module.original(x))


def _run(model: nn.Module, x: Tensor, path: str) -> None:
    torch.save(model(x).detach(), path)


def test_a_spawned_process_gets_the_plain_model(tmp_path: Path) -> None:
    module, x = planned()
    path = tmp_path / "result.pt"
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(module, x, str(path)))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert torch.equal(torch.load(path), module(x))
