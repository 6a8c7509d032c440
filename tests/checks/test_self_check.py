"""A version of PyTorch that was not tested runs a self-check at import, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rockmate._torch.version import is_tested, refuse_older

NIGHTLY = "3.7.0.dev20300101+cpu"
IMPORT = f"""
import torch
torch.__version__ = {NIGHTLY!r}
{{plant}}
import rockmate
print("imported", rockmate.Plan.__name__)
"""
PLANT = "import torch.utils.checkpoint as c; c.checkpoint = lambda run, *args, **_: run(*args)"


def imported(folder: Path, plant: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT.format(plant=plant)],
        env={**os.environ, "ROCKMATE_CACHE": str(folder), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_it_passes_with_a_line_once(tmp_path: Path) -> None:
    first = imported(tmp_path)
    assert first.returncode == 0, first.stderr
    assert f"PyTorch {NIGHTLY} is outside of the versions tested" in first.stderr
    assert "the self-check passed" in first.stderr
    second = imported(tmp_path)
    assert second.stdout == "imported Plan\n"
    assert "self-check" not in second.stderr
    # A version that was noted is not one that is known to behave.
    assert imported(tmp_path, PLANT).returncode == 0
    assert imported(tmp_path / "other", PLANT).returncode == 1
    assert imported(tmp_path / "other", PLANT, ROCKMATE_SKIP_CHECK="1").returncode == 0


def test_one_that_does_not_behave_is_refused_by_name(tmp_path: Path) -> None:
    found = imported(tmp_path, PLANT)
    assert found.returncode == 1
    assert "torch.utils.checkpoint.checkpoint does not behave" in found.stderr
    assert "ROCKMATE_SKIP_CHECK=1" in found.stderr
    assert not list(tmp_path.iterdir())


def test_a_step_that_differs_is_refused(tmp_path: Path) -> None:
    # The package runs its check while it is imported, so a first import without one plants.
    plant = """
import os
os.environ["ROCKMATE_SKIP_CHECK"] = "1"
import rockmate.checks.run as self_check
from rockmate.checks.run import CheckRow
self_check.check_case = lambda *_: CheckRow(name="tiny", failures=("planted",))
self_check.check_once()
"""
    found = imported(tmp_path, plant)
    assert found.returncode == 1
    assert "a tiny planned step failed: planted" in found.stderr


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.11.0", True), ("2.12.1+cu130", True), ("2.15.0", True), (torch.__version__, True),
        ("2.15.0.dev20261001", False), ("2.14.0a0+git123", False), ("2.16.0", False),
        ("3.0.0", False),
    ],
)  # fmt: skip
def test_which_versions_are_tested(version: str, tested: bool) -> None:
    refuse_older(version)
    assert is_tested(version) is tested


def test_older_versions_are_refused_at_once() -> None:
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or later and found 2\.10\.1"):
        refuse_older("2.10.1")
