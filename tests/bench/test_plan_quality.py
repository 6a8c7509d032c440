"""The table of plan quality tells hits from misses; the command writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import plan_quality
from bench.machine import machine_record
from bench.pages import Target
from bench.quality_page import page

HEAD = machine_record("bench.plan_quality") | {"tiny": False}


def model_line(model: str = "llama", **changes: Any) -> dict[str, Any]:
    line = HEAD | {
        "kind": "model", "model": model, "num_ops": 10, "baseline_peak_bytes": 1000,
        "baseline_ms": 100.0, "timings_s": {"capture": 50.0, "costs": 1.0, "solve": 1.5},
        "minimum_peak_bytes": {"none": 1000, "chen": 300, "rotor": 200, "rockmate": 100},
        "proved_minimum_bytes": 90, "loss_only_minimum_bytes": {"rotor": 200, "rockmate": 60},
        "frontiers": {"rockmate": [[100, 150.0], [500, 110.0], [1000, 100.0]]},
    }  # fmt: skip
    return line | changes


def plan_line(budget: float, ms: float, **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "plan",
        "model": "llama",
        "purpose": "budget",
        "strategy": "rockmate",
        "budget": budget,
        "is_feasible": True,
        "budget_bytes": int(1000 * budget),
        "peak_bytes": int(1000 * budget),
        "ms": ms,
        "ratio": ms / 100.0,
        "lower_bound_ms": 100.0,
        "gap": ms / 100.0 - 1.0,
        "chunks": "",
    }
    return HEAD | line | changes


def chunked_line(budget: float, ratio: float, **changes: Any) -> dict[str, Any]:
    size = int(1000 * budget)
    line = {"kind": "chunked", "model": "llama", "budget": budget, "budget_bytes": size}
    line |= {"peak_bytes": size, "ratio": ratio, "lower_bound_ratio": 1.05, "chunks": ""}
    return HEAD | line | changes


def rows(lines: Sequence[dict[str, Any]]) -> list[Target]:
    """The rows of targets on the page."""
    text = page(lines)
    first = text.index("## Targets") + 4
    verdicts = {"hit": True, "**miss**": False, "not measured": None}
    cells = [line[2:-2].split(" | ") for line in text[first : text.index("", first)]]
    return [Target(*map(str.strip, own[:4]), verdicts[own[4]]) for own in cells]


def row(start: str, *lines: dict[str, Any]) -> Target:
    """The one row whose text begins like that."""
    found = [row for row in rows(lines) if row.what.startswith(start)]
    assert len(found) == 1, found
    return found[0]


def is_hit(start: str, *lines: dict[str, Any]) -> bool | None:
    return row(start, *lines).is_hit


def test_nothing_measured_is_neither_hit_nor_missed() -> None:
    bare = model_line(frontiers={})
    del bare["minimum_peak_bytes"], bare["loss_only_minimum_bytes"]
    assert {found.is_hit for found in rows([bare])} == {None}
    assert row("llama at 0.48:", bare).verdict == "not measured"


def test_gap_rows_take_the_largest_and_the_median() -> None:
    lines = [model_line(), plan_line(1.0, 100.0), plan_line(0.5, 101.5), plan_line(0.25, 102.5)]
    largest, median = row("gap to the lower bound", *lines), row("the same: median", *lines)
    assert (largest.figure, largest.is_hit) == ("2.50 %", False)
    assert largest.where == "llama at 0.25; 2 of 3 within"
    assert (median.figure, median.is_hit) == ("1.50 %", False)
    assert row("gap to the lower bound", *lines[:3]).is_hit
    assert row("the same: median", *lines[:3]).is_hit
    below = plan_line(0.25, 0.0, is_feasible=False)
    assert (
        "(1 below the smallest peak left out)"
        in row("gap to the lower bound", *lines[:3], below).what
    )


@pytest.mark.parametrize(
    ("budget", "ratio", "is_hit"), [(0.25, 1.06, True), (0.25, 1.08, False), (0.24, 1.08, None)]
)
def test_gap_of_the_series_counts_budgets_with_a_target(
    budget: float, ratio: float, is_hit: bool | None
) -> None:
    lines = [model_line(), chunked_line(budget, ratio)]
    assert row("the same of the series", *lines).is_hit is is_hit
    noted = any(
        line.startswith("- llama at 0.25, only the loss returned: 3.00 %, unchunked")
        for line in page(lines)
    )
    assert noted is (is_hit is False)


@pytest.mark.parametrize(("ratio", "is_hit"), [(1.10, True), (1.11, False)])
def test_series_rows_hold_the_ratio_against_its_target(ratio: float, is_hit: bool) -> None:
    line = plan_line(0.48, 100 * ratio, ratio=ratio, purpose="series")
    assert row("llama at 0.48:", model_line(), line).is_hit is is_hit


def test_series_row_of_an_infeasible_budget_is_missed() -> None:
    found = row(
        "llama at 0.25:", model_line(), plan_line(0.25, 0.0, purpose="series", is_feasible=False)
    )
    assert (found.figure, found.is_hit) == ("infeasible", False)


@pytest.mark.parametrize(
    ("ratio", "peak_bytes", "is_hit"), [(1.10, 480, True), (1.11, 480, False), (1.10, 481, False)]
)
def test_rows_in_chunks_have_the_target_and_fit_the_budget(
    ratio: float, peak_bytes: int, is_hit: bool
) -> None:
    line = chunked_line(0.48, ratio, peak_bytes=peak_bytes, chunks="4")
    found = row("llama at 0.48, only the loss", model_line(), line)
    assert found.is_hit is is_hit
    assert "in 4 chunks; no considered graph has a schedule below 1.050" in found.where


def test_soundness_rows_name_what_fails() -> None:
    lines = [
        model_line(),
        plan_line(0.5, 120.0),
        plan_line(0.6, 130.0, peak_bytes=601),
        plan_line(0.7, 99.0, strategy="chen"),
    ]
    assert row("simulated peak", *lines).where == "llama at 0.600"
    assert row("simulated peak", *lines).is_hit is False
    assert row("plans at all budgets", *lines).where == "llama"
    assert row("plans at all budgets", *lines[:2]).is_hit
    assert row("plans at all budgets", *lines[:2], lines[2] | {"chunks": "4 recompute"}).is_hit
    chunked = lines[2] | {"chunks": "4 recompute"}
    assert row("the same, those in chunks", *lines[:2], chunked).where == "llama"
    assert row("no schedule", *lines).is_hit
    beaten = row("no schedule", *lines, plan_line(0.7, 101.0, lower_bound_ms=100.0))
    assert (beaten.where, beaten.is_hit) == ("llama chen at 0.700", False)
    assert row("frontier", model_line()).is_hit
    flat = model_line(frontiers={"chen": [[100, 120.0], [200, 120.0]]})
    assert row("frontier", flat).where == "llama chen"


def test_smallest_peak_and_strategy_rows() -> None:
    assert row("smallest feasible peak", model_line()).figure == "0.500"
    large = {"rotor": 100, "rockmate": 71}
    assert is_hit("smallest feasible peak", model_line(minimum_peak_bytes=large)) is False
    assert row("the same where only the loss", model_line()).figure == "0.300"
    of_loss = model_line(loss_only_minimum_bytes=large)
    assert is_hit("the same where only the loss", of_loss) is False
    pair = [plan_line(0.5, 110.0, strategy="chen"), plan_line(0.5, 109.0)]
    slower = pair[1] | {"ms": 110.1}
    assert is_hit("time beyond another", model_line(), *pair)
    assert is_hit("time beyond another", model_line(), pair[0], slower) is False
    assert is_hit("time beyond another", model_line(), pair[0]) is False


# --- the command ----------------------------------------------------------------------------------


def test_command_measures_writes_and_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = tmp_path / "quality"
    chosen = ["--tiny", "--quick", "--model", "vit-base", "--model", "mlp"]
    plan_quality.main([*chosen, "--output", str(stem)])
    printed = capsys.readouterr().out
    text = Path(f"{stem}.md").read_text()
    assert printed == text
    records = [json.loads(line) for line in Path(f"{stem}.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in records} >= {"model", "plan"}
    strategies = {
        record["strategy"]
        for record in records
        if record["kind"] == "plan" and record["model"] == "vit-base"
    }
    assert strategies == {"none", "chen", "rotor", "rockmate"}
    assert row("simulated peak", *records).is_hit
    assert row("no schedule", *records).is_hit
    monkeypatch.setattr(plan_quality, "Planner", None)
    plan_quality.main([*chosen, "--output", str(stem)])
    assert capsys.readouterr().out == text, "a finished model is not measured again"
    plan_quality.main(["--page", "--output", str(stem)])
    assert capsys.readouterr().out == text


def test_command_refuses_a_model_that_is_not_in_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        plan_quality.main(["--model", "gpt3"])
    assert "gpt2-deep" in capsys.readouterr().err
