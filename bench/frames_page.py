"""The page of `bench.frames`. Targets are set here, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.machine import machine_text
from bench.pages import all_row, table, targets, worst_row

Record = dict[str, Any]

SHARES = (1.1, 0.6, 0.4, 0.25)
"""Budgets, as shares of eager's peak."""

TIME_AT = {1.1: 1.02, 0.6: 1.12, 0.4: 1.25, 0.25: 1.35}
"""Targets of the time over eager's at each budget."""

TIME_OVER_PLAN = 1.15
"""Target of the time over that of a plan at the same budget."""

OVER_BUDGET = 1.01
"""Target of the measured peak over the budget, or over the smallest peak where that is larger."""


def page(lines: Sequence[Record]) -> list[str]:
    """Targets, and a table for each model."""
    newest = {(line["model"], line["method"]): line for line in lines}
    if not newest:
        return ["# Frames", "", "Nothing is measured."]
    names = list(dict.fromkeys(name for name, _ in newest))
    text = ["# Frames beside eager, checkpoints and plans", "", machine_text(lines[-1]), ""]
    text += [*_targets(newest, names), ""]
    for name in names:
        own = {method: line for (model, method), line in newest.items() if model == name}
        last = list(own.values())[-1]
        where = (
            f"Commit {last['commit']}, {last['processor']}, load average "
            f"{last['load_average']:.1f} at the start."
        )
        text += [f"## {name}", "", where, "", *_table(own), ""]
    return text[:-1]


def _targets(newest: dict[tuple[str, str], Record], names: Sequence[str]) -> list[str]:
    framed = [line for (_, method), line in newest.items() if method.startswith("frames")]
    rows = [
        all_row("bits of losses, gradients and buffers equal eager's",
                sum(line["is_bitwise"] for line in framed), len(framed)),
        worst_row("measured peak over the budget or the smallest peak", OVER_BUDGET,
                  [(_place(line), line["peak_bytes"] / _allowed(line)) for line in framed]),
    ]  # fmt: skip
    for share, reach in TIME_AT.items():
        lines = [newest[name, f"frames: {share}"] for name in names]
        within = [line for line in lines if line["minimum_bytes"] <= line["budget_bytes"]]
        figures = [(line["model"], line["ratio"]) for line in within]
        rows.append(worst_row(f"time at {share} of the peak", reach, figures))
    at_equal_peak = [
        (name, newest[name, "frames: as checkpoint"]["ratio"] / newest[name, "checkpoint"]["ratio"])
        for name in names
    ]
    rows.append(worst_row("time over checkpoints' at their peak", 1.0, at_equal_peak))
    beside_plans = [
        (_place(line), newest[name, method.replace("plan", "frames")]["ratio"] / line["ratio"])
        for (name, method), line in newest.items()
        if method.startswith("plan")
    ]
    rows.append(worst_row("time over a plan's", TIME_OVER_PLAN, beside_plans))
    return targets(rows)


def _place(line: Record) -> str:
    return f"{line['model']}, {line['method']}"


def _allowed(line: Record) -> int:
    return max(line["budget_bytes"], line["minimum_bytes"])


def _table(own: dict[str, Record]) -> list[str]:
    columns = ("method", "budget", "peak", "time", "bound", "made again", "bits")
    return table(columns, [_row(line, own["eager"]) for line in own.values()])


def _row(line: Record, eager: Record) -> list[str]:
    eager_bytes = line["eager_bytes"]
    budget = line["budget_bytes"]
    share = "" if budget is None else f"{budget / eager_bytes:.2f}"
    if line.get("minimum_bytes", 0) > (budget or 0):
        share += f" (smallest peak: {line['minimum_bytes'] / eager_bytes:.2f})"
    bound_s = line.get("bound_s")
    bound = "" if bound_s is None else f"{1 + bound_s / eager['seconds']:.3f}x"
    again = f"{line['num_recomputed']} of {line['num_frames']}" if "num_frames" in line else ""
    return [
        line["method"],
        share,
        f"{line['peak_bytes'] / eager_bytes:.3f}",
        f"{line['ratio']:.3f}x",
        bound,
        again,
        "equal" if line["is_bitwise"] else "**differ**",
    ]
