"""A disk that is full in the middle of a write leaves the file that was there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import rockmate
from rockmate._util import write_whole
from rockmate.curves.errors import SweepError

MACHINE = "cpu-avx2"  # which is estimated: quick


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Once called, each write stops half way."""
    real = Path.write_bytes

    def fails(self: Path, data: bytes) -> int:
        real(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(Path, "write_bytes", fails)


def sweep(**options: Any) -> rockmate.Sweep:
    torch.manual_seed(0)
    model = models.Stack(2).train()
    return rockmate.sweep(model, torch.randn(32, 16), machine=MACHINE, **options)


def contents(folder: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_what_is_written_stays_until_the_next_is_whole(tmp_path: Path, full_disk: Any) -> None:
    found = sweep(budgets=[0.8, 1.0])
    small = torch.nn.Linear(4, 4)
    fit = rockmate.fit(small, torch.ones(2, 4), "1MiB", machine=MACHINE, reserve=1, most=4)
    writers = {
        "plan.json": found.baseline.save,
        "sweep.json": found.save,
        "sweep.png": found.plot,
        "fit.json": fit.save,
        "fit.svg": fit.plot,
    }
    for name, write in writers.items():
        write(tmp_path / name)
    before = contents(tmp_path)
    assert {each.name for each in before} == set(writers)
    full_disk()
    for name, write in writers.items():
        with pytest.raises(OSError, match=f"No space left.*{name}'"):
            write(tmp_path / name)
    assert contents(tmp_path) == before


def test_a_sweep_keeps_its_folder(tmp_path: Path, full_disk: Any) -> None:
    sweep(budgets=[0.8], out=tmp_path)
    before = contents(tmp_path)
    full_disk()
    with pytest.raises(SweepError, match=r"No space left.*is kept"):
        sweep(budgets=[0.9], out=tmp_path)
    assert contents(tmp_path) == before


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    write_whole("/dev/null", "nothing")
    assert Path("/dev/null").is_char_device()
