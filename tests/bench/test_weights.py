"""The bench of weights that do not fit: two layers, planned and swapped by hand, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import weights


def test_records_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    stem = tmp_path / "weights"
    sizes = ["--case", "8b-12", "--rows", "2", "--layers", "2", "--gib", "3", "--limit", "1"]
    assert weights.main([*sizes, "--output", str(stem)]) == 0
    *_, line = Path(f"{stem}.jsonl").read_text(encoding="utf-8").splitlines()
    found = json.loads(line)
    assert found["bound_ms"] <= found["ms"]
    assert 0 <= found["resident_bytes"] < found["weight_bytes"]
    assert found["copied_bytes"] >= found["weight_bytes"] - found["resident_bytes"]
    assert "over the bound" in capsys.readouterr().out
