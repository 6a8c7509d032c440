"""The campaign for a GPU runs on a CPU with tiny models, resumes, and prints its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moves
import pytest
import torch

from bench import cuda
from bench.command import read
from rockmate._torch.inductor import missing_compiler

PARTS = ["correctness", "step", "costs", "batch"]


def finished(folder: Path, part: str) -> list[Any]:
    return read(folder / f"{part}.jsonl")


def run(folder: Path, *options: str) -> int:
    command = ["--output", str(folder), "--tiny", "--device", "cpu", "--model", "gpt2-medium"]
    return cuda.main([*command, "--part", *PARTS, *options])


def test_the_campaign_resumes_and_prints_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--seconds", "0.001")
    assert "cases left" in capsys.readouterr().err
    assert len((tmp_path / "correctness.jsonl").read_text().splitlines()) == 1
    run(tmp_path)
    assert "0 cases left" in capsys.readouterr().err
    for part in PARTS:
        records = finished(tmp_path, part)
        assert records
        assert not [record["error"] for record in records if "error" in record]
    (correct,) = finished(tmp_path, "correctness")
    assert correct["num_equal"] == correct["num_gradients"] > 0
    assert correct["num_recomputations"] > 0
    assert all(
        step["own_peak_bytes"] <= step["budget_bytes"] for step in finished(tmp_path, "step")
    )
    assert cuda.main(["--output", str(tmp_path), "--page"]) == 0
    text = capsys.readouterr().out
    assert "| measured peak <= budget | all | 3 of 3 |" in text
    assert "gpt2-medium | 24 GB" in text


def test_the_part_with_fused_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := missing_compiler("cpu"):
        pytest.skip(missing)
    monkeypatch.setattr("rockmate.fusion.kernels.time_ms", lambda *_: 1.0)  # all are taken
    command = ["--output", str(tmp_path), "--tiny", "--device", "cpu", "--model", "gpt2-medium"]
    assert cuda.main([*command, "--part", "fused"]) == 0
    records = finished(tmp_path, "fused")
    assert [record["setting"] for record in records] == ["1.0", "0.5", "0.25"]
    for record in records:
        assert "error" not in record
        assert record["num_places"] >= record["num_kernels"] > 0
        # A kernel rounds once where ops round each time; processors differ in how.
        assert record["difference"] < 4 * torch.finfo(torch.bfloat16).eps
        assert record["own_peak_bytes"] <= record["budget_bytes"]
    assert cuda.main(["--output", str(tmp_path), "--page"]) == 0
    assert "## Fused" in capsys.readouterr().out


def test_the_part_with_moves_to_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moves.use_fast_link(monkeypatch)
    command = ["--output", str(tmp_path), "--tiny", "--device", "cpu", "--model", "gpt2-medium"]
    assert cuda.main([*command, "--part", "offload"]) == 0
    records = finished(tmp_path, "offload")
    assert [record["setting"] for record in records] == ["0.5", "0.25", "save_on_cpu"]
    assert not [record["error"] for record in records if "error" in record]
    for record in records[:2]:
        assert record["num_moves"]
        assert record["host_bytes"] == record["predicted_host_bytes"] > 0
        assert record["own_peak_bytes"] <= record["budget_bytes"]
        assert record["num_host_waits"] == record["eager_host_waits"] == 0
    assert cuda.main(["--output", str(tmp_path), "--page"]) == 0
    text = capsys.readouterr().out
    assert "## Offload" in text
    assert "| host bytes as predicted | all | 2 of 2 |" in text


def test_an_error_is_a_record_and_stops_nothing(tmp_path: Path) -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("no memory")

    good = cuda.Case("costs", "a", "", lambda: {"measured_ms": 1.0})
    assert cuda.run(tmp_path, [cuda.Case("costs", "b", "", fail), good], 60.0) == 0
    failed, done = map(json.loads, (tmp_path / "costs.jsonl").read_text().splitlines())
    assert failed["error"] == "RuntimeError: no memory"
    assert done["measured_ms"] == 1.0
    records = {part: [] for part in (*PARTS, "fused", "peers", "offload")} | {"costs": [failed]}
    machine = dict.fromkeys(("command", "commit", "processor", "machine", "num_cores"), "x")
    machine |= {"gpu": None, "num_threads": 1, "python": "3", "torch": "2", "transformers": "5"}
    assert "b : RuntimeError: no memory" in cuda.page(records, machine)
