"""`bench.frames`: its models repeat themselves, and a run of tiny ones gives lines and a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import frames
from bench.models import dynamic


@pytest.mark.parametrize("name", dynamic.NAMES)
def test_a_seed_repeats_a_step_and_another_differs(name: str) -> None:
    made = dynamic.build(name, tiny=True)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return made.model(**made.make_batch(seed)).item()

    assert loss(0) == loss(0)
    assert loss(0) != loss(1)


@pytest.mark.parametrize("name", ["halting", "gpt2-deep"])
def test_a_run_of_a_tiny_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = tmp_path / "frames"
    arguments = ["--tiny", "--rounds", "1", "--output", str(stem), "--model", name]
    assert frames.main(arguments) == 0
    lines = [json.loads(line) for line in Path(f"{stem}.jsonl").read_text().splitlines()]
    framed = [line for line in lines if line["method"].startswith("frames")]
    assert len(framed) == 5
    assert all(line["is_bitwise"] for line in framed)
    has_plans = any(line["method"].startswith("plan") for line in lines)
    assert has_plans == (name in dynamic.CONTROLS)
    page = Path(f"{stem}.md").read_text()
    assert page == capsys.readouterr().out
    assert "bits of losses, gradients and buffers equal eager's | all | 5 of 5" in page


def test_nothing_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frames.main(["--page", "--output", str(tmp_path / "frames")]) == 1
    assert "has no line" in capsys.readouterr().err
    assert not (tmp_path / "frames.md").exists()
