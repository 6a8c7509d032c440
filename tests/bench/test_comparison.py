"""The comparison: what dominates what, from lines made by hand, and the command from end to end."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench import command as commands
from bench import compare
from bench.command import read
from bench.comparison.page import page, points_csv, readme_table
from bench.comparison.plans import peaks_to_meet
from bench.comparison.result import ModelResult, by_model
from bench.pages import about

OPTIONS = {"method": [], "rounds": 2, "tiny": False}
MACHINE: dict[str, Any] = {
    **dict.fromkeys(("processor", "machine", "python", "torch", "transformers"), "M"),
    "num_cores": 2,
    "num_threads": 1,
    "load_average": 0.5,
    "commit": "abc",
    "gpu": None,
}


def point(
    method: str, peak_bytes: int, ratios: list[float], *, difference: float = 0.0, **plan: Any
) -> list[Any]:
    """The lines of a method; one with a plan is ours."""
    common = {"model": "m", "method": method}
    own = {
        "kind": "point",
        "owner": "ours" if plan else "peer",
        "family": method.partition(":")[0],
        "peak_bytes": peak_bytes,
        "resident_bytes": None,
        "prepare_s": 0.0,
        "same_as": None,
        "gradients": {"largest_relative": difference},
    }
    times = [
        {"kind": "time", "round": index, "ms": 10 * ratio, "eager_ms": 10.0}
        for index, ratio in enumerate(ratios)
    ]
    plans = [{"kind": "plan", **plan}] if plan else []
    return [common | each for each in (own, *times, *plans)]


def ours(
    share: Any, peak_bytes: int, ratios: list[float], budget: int, predicted: float
) -> list[Any]:
    plan = {"budget_bytes": budget, "predicted_ratio": predicted}
    return point(f"rockmate: {share}", peak_bytes, ratios, **plan)


def records(*points: list[Any]) -> list[Any]:
    run = {"kind": "run", "model": "m", "options": OPTIONS, **MACHINE}
    return [run, *(record for own in points for record in own)]


EAGER = point("eager", 1000, [1.0, 1.0])


def test_ours_is_the_fastest_by_promise_of_those_that_are_no_larger() -> None:
    result = ModelResult(
        "m",
        records(
            EAGER,
            point("checkpoint", 400, [1.3, 1.3]),
            ours("0.5", 500, [1.0, 1.0], 500, 10.0),
            ours("0.4", 400, [1.2, 1.2], 400, 11.0),
            # Luckier than it promised.
            ours("0.3", 300, [1.1, 1.1], 300, 12.0),
            # Ours by another strategy: not held against peers.
            point("rotor: 0.4", 400, [1.0, 1.0], budget_bytes=400, predicted_ratio=9.0),
        ),
    )
    found = {match.peer.method: match for match in result.matches}
    own = found["checkpoint"].ours
    assert own is not None
    assert own.method == "rockmate: 0.4"
    assert found["checkpoint"].excess == pytest.approx(1.2 / 1.3 - 1)
    assert result.checkpoint is found["checkpoint"]


@pytest.mark.parametrize(
    ("ratios", "peak_bytes", "is_dominated"),
    [([1.019], 400, True), ([1.021], 400, False), ([1.0], 401, False)],
)
def test_dominated_is_no_more_memory_and_no_more_time_beyond_two_percent(
    ratios: list[float], peak_bytes: int, is_dominated: bool
) -> None:
    result = ModelResult(
        "m", records(point("checkpoint", 400, [1.0]), ours("x", peak_bytes, ratios, 401, 1.0))
    )
    assert [match.is_dominated for match in result.matches] == [is_dominated]


def test_the_ratio_is_the_median_of_rounds_each_over_its_own_eager() -> None:
    found = records(EAGER, point("selective", 500, []))
    for index, (ms, eager_ms) in enumerate([(10.0, 5.0), (30.0, 20.0), (11.0, 10.0)]):
        time = {"kind": "time", "model": "m", "method": "selective", "round": index}
        found.append(time | {"ms": ms, "eager_ms": eager_ms})
    own = ModelResult("m", found).peers[1]
    assert (own.ratio, own.ms, own.spread) == (1.5, 11.0, pytest.approx(0.9))


def test_the_least_peak_of_ours_has_to_be_fast_enough() -> None:
    result = ModelResult(
        "m",
        records(
            EAGER,
            point("min-cut: 0.1 dp", 400, [1.5]),
            ours("minimum", 100, [2.6], 100, 26.0),
            ours("0.2", 200, [1.4], 200, 14.0),
        ),
    )
    least = result.least
    assert least is not None
    assert least.ours is not None
    assert (least.peer.peak_bytes, least.ours.peak_bytes) == (400, 200)


def test_the_page_tells_misses_wrong_gradients_failures_and_repetitions() -> None:
    lines = records(
        EAGER,
        point("checkpoint", 400, [1.3, 1.3]),
        point("min-cut: 0.5 dp", 450, [0.9, 1.0], difference=0.7),
        ours("1.0", 900, [1.0, 1.0], 900, 10.0),
        ours("0.4", 410, [1.1, 1.1], 400, 11.0),
    )
    lines.append(
        {
            "kind": "failed",
            "model": "m",
            "method": "sqrt(n) segments",
            "owner": "peer",
            "error": "ValueError: none",
        }
    )
    lines.append({**point("min-cut: 0.4 dp", 450, [])[0], "same_as": "min-cut: 0.5 dp"})
    text = "\n".join(page(lines))
    assert "dominated, within 2 % of time | all | 1 of 3 |  | **miss** |" in text
    assert "our measured peaks within the budget | all | 1 of 2 |  | **miss** |" in text
    assert "| m | checkpoint | 0.0004 | 1.300 ± 0.000 | none as small |" in text
    assert "**wrong**, 0.7" in text
    results = [ModelResult(name, own) for name, own in by_model(lines).items()]
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(points_csv(results)))}
    assert rows["sqrt(n) segments"]["note"] == "failed: ValueError: none"
    assert rows["min-cut: 0.4 dp"]["note"] == "the same as min-cut: 0.5 dp"
    cut = rows["min-cut: 0.5 dp"]
    assert (cut["peak_of_eager"], cut["time_over_eager"]) == ("0.4500", "0.9500")
    assert (cut["gradient_difference"], cut["is_dominated"]) == ("7.0e-01", "no")
    assert rows["eager"]["our_peak_mb"] == "0.001"


def test_peers_with_nearly_the_same_peak_share_the_plan_for_the_smallest() -> None:
    assert peaks_to_meet([2000, 1000, 1009, 1011, 1010]) == [1000, 1011, 2000]


def test_a_line_that_an_interruption_cut_off_is_dropped_and_a_damaged_one_told(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"model": "a", "kind": "run"}\n{"model": "a", "ki')
    assert read(path) == [{"model": "a", "kind": "run"}]
    commands.add_line(path, {"model": "a", "kind": "point"})
    assert [record["kind"] for record in read(path)] == ["run", "point"]
    path.write_text('{"model\n{"model": "a", "kind": "run"}\n')
    with pytest.raises(ValueError, match="line 1"):
        read(path)


@pytest.mark.slow
def test_the_command_measures_writes_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = tmp_path / "peers"
    tiny = ["--model", "encoder", "--tiny", "--rounds", "1"]
    command = [*tiny, "--method", "checkpoint", "--output", str(stem)]
    assert compare.main(command) == 0
    page_text = capsys.readouterr().out
    assert Path(f"{stem}.md").read_text() == page_text
    lines = Path(f"{stem}.jsonl")
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    points = {record["method"]: record for record in found if record["kind"] == "point"}
    at_checkpoint = next(
        record for name, record in points.items() if name.startswith("rockmate: at")
    )
    assert points["checkpoint"]["peak_bytes"] < points["eager"]["peak_bytes"]
    assert at_checkpoint["peak_bytes"] <= points["eager"]["peak_bytes"]
    assert all(
        record["gradients"]["equal"] and record["resident_bytes"] > 0 for record in points.values()
    )
    assert {record["method"] for record in found if record["kind"] == "time"} == points.keys()

    (name,) = (name for name in points if name.startswith("rockmate: at"))
    alone = tmp_path / "alone"
    assert compare.main([*tiny, "--method", name, "--output", str(alone)]) == 0
    recompute = [json.loads(line) for line in Path(f"{alone}.jsonl").read_text().splitlines()]
    budgets = {
        record["budget_bytes"]
        for record in (*found, *recompute)
        if record["kind"] == "plan" and record["method"] == name
    }
    assert budgets == {points["checkpoint"]["peak_bytes"]}
    assert name in {record["method"] for record in recompute if record["kind"] == "point"}
    capsys.readouterr()

    assert compare.main(command) == 0  # finished: no process starts
    assert len(lines.read_text().splitlines()) == len(found)
    assert compare.main(["--page", "--output", str(stem)]) == 0
    assert capsys.readouterr().out == page_text * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--loss-only"]])
def test_a_plan_in_chunks_is_measured(options: list[str], tmp_path: Path) -> None:
    method = "rockmate: at 0.131 MB"  # below the smallest peak of this model without chunks
    tiny = ["--model", "gpt2-12", "--tiny", "--rounds", "1"]
    output = tmp_path / "chunks"
    assert compare.main([*tiny, "--method", method, "--output", str(output), *options]) == 0
    peaks = {
        record["method"]: record["peak_bytes"]
        for record in read(tmp_path / "chunks.jsonl")
        if record["kind"] == "point"
    }
    assert 0 < peaks[method] <= 131_000 < peaks["eager"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "gpt3"], "gpt2-deep"),
        (["--tiny"], "--output"),
        (["--rounds", "0"], "at least 1"),
        (["--method", "rockmate: half", "--output", "x"], "rockmate: at 12.5 MB"),
        (["--method", "min-cut: 0.7 dp", "--output", "x"], "checkpoint: every 2"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert text in capsys.readouterr().err


def test_commands_commits_and_machines_stand_with_their_models_where_they_differ() -> None:
    def start(model: str, commit: str) -> dict[str, Any]:
        return MACHINE | {"model": model, "command": "run", "commit": commit}

    same = "\n".join(about([start("a", "x"), start("b", "x")]))
    assert (
        "`run` at commit x, load average 0.5 at the start. M (M), 2 cores, 1 thread used." in same
    )
    apart = "\n".join(about([start("a", "x"), start("b", "y"), start("c", "x")]))
    assert "from 1 command at 2 commits on 1 machine" in apart
    assert "| `run` | x | a, c |" in apart
    assert "| `run` | y | b |" in apart


# --- README's table -------------------------------------------------------------------------------


def test_readme_has_the_rows_of_the_committed_lines() -> None:
    lines = by_model(read(commands.RESULTS / "peers_cpu_202611.jsonl"))
    rows = readme_table([ModelResult(name, own) for name, own in lines.items()])
    assert len(rows) == 2 + 8
    readme = (Path(compare.__file__).parents[1] / "README.md").read_text().splitlines()
    stated = {line.split(" | ")[0]: line for line in readme}
    for row in rows[2:]:
        cells, found = (_numbers(line) for line in (row, stated[row.split(" | ")[0]]))
        assert found == pytest.approx(cells, abs=0.051), row


def _numbers(line: str) -> list[float]:
    cells = [cell.strip() for cell in line.strip("| ").split("|")][1:]
    return [float(number) for cell in cells for number in cell.split(", ")]
