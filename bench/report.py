"""Measured lines as a page that a person reads.

    python -m bench.run --model gpt2-deep --budget 0.5 ... >> bench/results/cpu_202611.jsonl
    python -m bench.report bench/results/cpu_202611.jsonl > bench/results/cpu_202611.md

Every line of the file is one row; targets are those that the project has set itself, and a miss is marked as one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import hardware_text, versions_text

Record = dict[str, Any]

TIME_AT_HALF = {"gpt2-deep": 1.10, "bert-base": 1.10, "llama": 1.10, "vit-base": 1.10}
TIME_AT_QUARTER = {"gpt2-deep": 1.22, "bert-base": 1.22, "vit-base": 1.22, "llama": 1.35}
PLANNING_S = {"gpt2": 5.0, "bert-base": 5.0, "vit-base": 5.0, "gpt2-48": 15.0}  # 12 and 48 layers
PEAK_TOLERANCE = 0.02
GRADIENT_TOLERANCE = 1e-6
TIME_TOLERANCE = 0.05
LEAST_PEAK_OF_CHECKPOINT = 0.8
TIME_OF_CHECKPOINT = 0.92


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page for the given files of JSON lines."""
    parser = argparse.ArgumentParser(
        prog="bench.report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path)
    files: list[Path] = parser.parse_args(arguments).files
    records = [
        json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()
    ]
    sys.stdout.write("\n".join(page(records)) + "\n")
    return 0


def page(records: Sequence[Record]) -> list[str]:
    """The page's lines: the machine, one table of budgets, one of targets."""
    return [
        *_head(records),
        "",
        *_table(records),
        "",
        *_checkpoints(records),
        "",
        *_targets(records),
    ]


def _head(records: Sequence[Record]) -> list[str]:
    first = records[0]
    return [
        "# Time and memory on one CPU thread",
        "",
        f"Machine: {hardware_text(first)}. {versions_text(first)}. Commit {first['commit']}.",
        "",
        "Commands (the load average when each began, in brackets):",
        "",
        *[f"- `{r['command']}` ({r['load_average']:.1f})" for r in _one_of_each_model(records)],
        "",
        "Eager, one checkpoint a layer and every budget were timed in turn in one process run for each model; a ratio is the median "
        "over rounds of the time over eager's in the same round, ± the spread of these ratios (largest less smallest). Peaks are "
        "the excess over what was allocated when the forward was called, `.grad` in place and the outputs held: by the allocator's "
        "events, and by the process's resident high-water mark in a process of its own. The latter also holds what no allocator "
        "event shows: scratch memory of the math libraries, and the C heap's own slack. The predicted ratio is that of the plan's time "
        "to the captured graph's with nothing recomputed; it is held against the measured one as a quotient. A budget "
        "is a fraction of the peak with nothing recomputed. MB are millions of bytes.",
    ]


def _table(records: Iterable[Record]) -> list[str]:
    rows = [
        "## Budgets",
        "",
        "| model | budget | budget MB | predicted MB | measured MB | resident MB | of eager's peak | time / eager | predicted ratio "
        "| gradients | plan s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        if not r["feasible"]:
            rows.append(
                f"| {r['model']} | {r['budget']} | infeasible: the minimum is {_mb(r['minimum_peak_bytes'])} MB |"
                + " |" * 8
            )
            continue
        equal = all(r["gradients_equal"]) and all(r["losses_equal"])
        rows.append(
            f"| {r['model']} | {r['budget']} | {_mb(r['budget_bytes'])} | {_mb(r['predicted_peak_bytes'])} | {_mb(r['peak_bytes'])} "
            f"| {_mb(r['resident_peak_bytes'])} | {r['peak_of_eager']:.3f} | {r['ratio']:.3f} ± {r['ratio_spread']:.3f} "
            f"| {r['predicted_ratio']:.3f} | {'bitwise' if equal else f'{_worst(r):.1e}'} | {r['plan_s']:.2f} |"
        )
    return rows


def _checkpoints(records: Sequence[Record]) -> list[str]:
    rows = [
        "## Eager, one checkpoint a layer, and planning",
        "",
        "| model | eager MB | resident | eager ms | baseline MB | checkpoint MB | its time / eager | capture s | costs s | solve s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in _one_of_each_model(records):
        spent = r["planner_timings"]
        ratio = r.get("checkpoint_ratio")
        rows.append(
            f"| {r['model']} | {_mb(r['eager_peak_bytes'])} | {_mb(r['eager_resident_peak_bytes'])} | {r['eager_ms']:.0f} "
            f"| {_mb(r['baseline_peak_bytes'])} | {_mb(r.get('checkpoint_peak_bytes'))} | {f'{ratio:.3f}' if ratio else ''} "
            f"| {spent['capture']:.1f} | {spent['costs']:.1f} | {spent['solve']:.1f} |"
        )
    return rows


def _targets(records: Sequence[Record]) -> list[str]:
    feasible = [r for r in records if r["feasible"]]
    checks = [
        _share(
            "measured peak (allocator) <= budget",
            [r["peak_bytes"] <= r["budget_bytes"] for r in feasible],
        ),
        _share(
            "predicted peak within 2 % of measured",
            [abs(r["peak_prediction_error"]) <= PEAK_TOLERANCE for r in feasible],
        ),
        _share("gradients, losses and buffers bitwise equal", [_is_bitwise(r) for r in feasible]),
        _share(
            "time ratio within 5 % of predicted",
            [abs(r["predicted_ratio"] / r["ratio"] - 1) <= TIME_TOLERANCE for r in feasible],
        ),
        _share(
            "gradients within 1e-6 relative where not bitwise",
            [_worst(r) <= GRADIENT_TOLERANCE for r in feasible],
        ),
        _share("each further budget planned in 0.5 s", [r["plan_s"] <= 0.5 for r in feasible]),
        _resident(feasible),
    ]
    for r in _one_of_each_model(records):
        if r["model"] in PLANNING_S:
            spent = r["planner_timings"]["costs"] + r["planner_timings"]["solve"]
            checks.append(
                _row(f"{r['model']}: planning after capture, s", PLANNING_S[r["model"]], spent)
            )
    for r in feasible:
        checks += _targets_of(r)
    return ["## Targets", "", "| what | reach | measured | |", "|---|---|---|---|", *checks]


def _targets_of(r: Record) -> list[str]:
    name, rows = r["model"], []
    if r["budget"] == "1.0":
        rows.append(_row(f"{name}: budget 1.0, time", 1.02, r["ratio"]))
        rows.append(_row(f"{name}: budget 1.0, peak of eager's", 1.00, r["peak_of_eager"]))
    if r["budget"] == "0.5" and name in TIME_AT_HALF:
        rows.append(_row(f"{name}: budget 0.5, time", TIME_AT_HALF[name], r["ratio"]))
    if r["budget"] == "0.25" and name in TIME_AT_QUARTER:
        rows.append(_row(f"{name}: budget 0.25, time", TIME_AT_QUARTER[name], r["ratio"]))
    if r["budget"] == "minimum" and r.get("checkpoint_peak_bytes"):
        share = r["peak_bytes"] / r["checkpoint_peak_bytes"]
        rows.append(
            _row(f"{name}: minimum against the checkpoint's peak", LEAST_PEAK_OF_CHECKPOINT, share)
        )
    if r["budget"] == "checkpoint":
        share = r["ratio"] / r["checkpoint_ratio"]
        rows.append(
            _row(
                f"{name}: time at the checkpoint's peak against its time", TIME_OF_CHECKPOINT, share
            )
        )
    return rows


def _resident(records: Sequence[Record]) -> str:
    """How the resident high-water mark compares: it holds more than any allocator event shows, so it is stated, not judged."""
    shares = [
        r["resident_peak_bytes"] / r["budget_bytes"] for r in records if r["resident_peak_bytes"]
    ]
    return (
        f"| resident high-water mark over the budget | | {min(shares):.3f} to {max(shares):.3f} | see above |"
        if shares
        else ""
    )


def _worst(r: Record) -> float:
    return max(difference["largest_relative"] for difference in r["gradient_differences"])


def _is_bitwise(r: Record) -> bool:
    return all(r["gradients_equal"]) and all(r["losses_equal"]) and all(r["buffers_equal"])


def _share(what: str, hits: Sequence[bool]) -> str:
    return f"| {what} | all | {sum(hits)} of {len(hits)} | {'hit' if all(hits) else '**miss**'} |"


def _row(what: str, target: float, measured: float) -> str:
    return f"| {what} | <= {target:.2f} | {measured:.3f} | {'hit' if measured <= target else '**miss**'} |"


def _one_of_each_model(records: Iterable[Record]) -> list[Record]:
    return list({r["model"]: r for r in records}.values())


def _mb(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.1f}"


if __name__ == "__main__":
    sys.exit(main())
