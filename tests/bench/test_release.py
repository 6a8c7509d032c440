"""The release command: a rehearsal from end to end, and README's rows from committed lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import models, release
from bench.compare import RESULTS
from bench.comparison import process


def test_readme_has_the_rows_of_the_committed_lines() -> None:
    rows = release._table(RESULTS / "peers_cpu_202611", release.ROWS)
    assert len(rows) == 2 + len(release.ROWS)
    lines = {line.split(" | ")[0]: line for line in _readme()}
    for row in rows[2:]:
        cells, stated = (_numbers(line) for line in (row, lines[row.split(" | ")[0]]))
        assert stated == pytest.approx(cells, abs=0.051), row


def _readme() -> list[str]:
    return (Path(release.__file__).parents[1] / "README.md").read_text().splitlines()


def _numbers(line: str) -> list[float]:
    cells = [cell.strip() for cell in line.strip("| ").split("|")][1:]
    return [float(number) for cell in cells for number in cell.split(", ")]


def test_the_models_are_among_those_of_the_comparison() -> None:
    assert set(release.ROWS) <= set(models.COMPARED["cpu"])


def test_a_rehearsal_measures_both_steps_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    command = ["--quick", "--output", str(tmp_path)]
    assert release.main(command) == 0
    text = (tmp_path / "README.md").read_text()
    assert capsys.readouterr().out.endswith(text)
    assert "| MLP | " in text
    assert "plans are within 2 % of the lower bound" in text
    assert {path.name for path in tmp_path.glob("*.md")} == {
        "README.md",
        "peers.md",
        "plan_quality.md",
    }
    lines = (tmp_path / "peers.jsonl").read_text().splitlines()
    kinds = {json.loads(line)["kind"] for line in lines}
    assert kinds >= {"point", "time", "plan", "finished"}

    monkeypatch.setattr(process, "start", None)
    monkeypatch.setattr("bench.plan_quality.measure", None)
    assert release.main(command) == 0
    assert (tmp_path / "README.md").read_text() == text
