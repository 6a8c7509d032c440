"""The benchmark of moves, on a layer and a small model: its records, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import moves
import pytest

from bench import offload as bench_offload


def test_records_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stem, output = tmp_path / "moves", tmp_path / "moves.jsonl"
    monkeypatch.setattr(bench_offload, "MACHINES", ("rtx4090",))
    monkeypatch.setattr(bench_offload, "SIMULATED_SHARES", (0.7, 0.5))
    sizes = ["--layers", "2", "--tokens", "512"]
    assert bench_offload.main(["--simulated", *sizes, "--output", str(stem)]) == 0
    moves.use_fast_link(monkeypatch)
    monkeypatch.setattr(bench_offload, "SHARES", (0.3,))
    monkeypatch.setattr(bench_offload, "NUM_ROUNDS", 1)
    folder = tmp_path / "scratch"
    folder.mkdir()
    options = ["--measured", str(folder), "--model", "resnet", "--output", str(stem)]
    assert bench_offload.main(options) == 0
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [record["kind"] for record in records] == ["simulated"] * 4 + ["measured"]
    for record in records[:3]:
        assert record["bound_ratio"] <= record["ratio"] * (1 + 1e-6)
        assert record["recompute_ratio"] is None or record["ratio"] <= record["recompute_ratio"]
    measured = records[-1]
    assert measured["is_bitwise"]
    assert measured["num_moves"]
    assert measured["measured_host_bytes"] == measured["predicted_host_bytes"]
    capsys.readouterr()
    assert bench_offload.main(["--page", "--output", str(stem)]) == 0
    printed = capsys.readouterr().out
    assert "| gradients bitwise eager's | all | 1 of 1 |  | hit |" in printed
    assert "## rtx4090: 2 layers, 512 tokens" in printed
    assert "by moving everything" in printed
