"""The table of plan quality tells hits from misses; the command writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import command, plan_quality
from bench.machine import machine_record

HEAD = machine_record("bench.plan_quality")


def line_of(*plans: dict[str, Any], **changes: Any) -> dict[str, Any]:
    found = HEAD | {
        "model": "llama", "outputs": "all", "num_ops": 2_000, "baseline_peak_bytes": 1000,
        "least_bytes": {"chen": 400, "rotor": 200, "rockmate": 100}, "proved_bytes": 90,
        "plans": plans,
    }  # fmt: skip
    return found | changes


def plan_of(share: float, ratio: float, **changes: Any) -> dict[str, Any]:
    size = int(1000 * share)
    found = {"share": share, "budget_bytes": size, "peak_bytes": size, "ratio": ratio}
    found |= {"bound": 1.0, "gap": ratio - 1.0, "chunks": "", "others": {"rotor": 1.2}}
    return found | changes


def target(start: str, *lines: dict[str, Any]) -> str:
    """The one row whose text begins like that."""
    rows = [each for each in plan_quality.page(lines) if each.startswith(f"| {start}")]
    assert len(rows) == 1, rows
    return rows[0]


def test_gaps_are_within_two_percent_or_a_miss() -> None:
    line = line_of(plan_of(0.5, 1.015), plan_of(0.25, 1.025))
    assert "2.50 % | llama at 0.25; 1 of 2 within | **miss**" in target("gap to the", line)
    assert target("gap to the", line_of(plan_of(0.5, 1.015))).endswith("| hit |")
    assert target("llama | 2,000 |", line).count("% |") == 2
    assert "| not measured |" in target("gap to the", line_of())


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ("simulated peak <= budget", {"peak_bytes": 501}),
        ("no schedule of any strategy beats the lower bound", {"bound": 1.3}),
        ("no schedule of any strategy beats", {"bound": 1.05, "others": {"rotor": 1.04}}),
        ("time beyond another strategy's", {"others": {"rotor": 1.04}}),
        ("plans of a model: none slower", {"budget_bytes": 700, "ratio": 1.2}),
    ],
)
def test_what_may_never_be_is_a_miss(row: str, changes: dict[str, Any]) -> None:
    smaller = plan_of(0.6, 1.03)
    assert target(row, line_of(smaller, plan_of(0.5, 1.05))).endswith("| hit |")
    assert target(row, line_of(smaller, plan_of(0.5, 1.05) | changes)).endswith("| **miss** |")


def test_smallest_peaks_are_beside_rotors() -> None:
    assert target("smallest peak, of Rotor's", line_of()).endswith("| hit |")
    large = {"chen": 100, "rotor": 100, "rockmate": 71}
    assert target("smallest peak, of Rotor's", line_of(least_bytes=large)).endswith("| **miss** |")
    alone = line_of(outputs="loss", least_bytes=large)
    assert target("the same where only the loss", alone).endswith("| **miss** |")


def test_command_measures_writes_and_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = tmp_path / "quality"
    chosen = ["--tiny", "--model", "mlp", "--model", "qwen3-30b-a3b", "--share", "0.9"]
    assert plan_quality.main([*chosen, "--share", "0.01", "--output", str(stem)]) == 0
    text = capsys.readouterr().out
    records = command.read(Path(f"{stem}.jsonl"))
    assert [each["outputs"] for each in records] == ["all", "loss"] * 2
    for each in records:
        assert [plan["share"] for plan in each["plans"]] == [0.9], "nothing fits in a hundredth"
        assert 0 <= each["plans"][0]["gap"] < 1
    assert records[0]["plans"][0]["others"].keys() == {"rotor"}
    assert target("simulated peak", *records).endswith("| hit |")
    assert target("no schedule", *records).endswith("| hit |")
    assert plan_quality.main(["--page", "--output", str(stem)]) == 0
    assert capsys.readouterr().out == text
