"""The page of `bench.fused`. Targets are set here, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.machine import machine_text
from bench.pages import all_row, table, targets, worst_row

Record = dict[str, Any]

SHARES = (None, 0.5, 0.25, 0.1)
"""Budgets as shares of eager's peak; None recomputes nothing."""

TIME_AT = {0.5: 0.90, 0.25: 1.00, 0.1: 1.12}
"""Targets of the time over eager's of GPT-2 and Llama with fused kernels."""

BOUNDED = ("gpt2-12", "gpt2-deep", "llama")
"""The models of `TIME_AT`. The others' time is in products, attention and convolutions."""

PREDICTED = 1.005
"""Target of the measured peak over the predicted one."""

ERROR = 1e-5
"""Target of the error of a gradient against eager's."""

COMPILE_S = 40.0
"""Target of the seconds of compilation, with nothing compiled before."""


def page(lines: Sequence[Record]) -> list[str]:
    """Targets, and a table for each model."""
    newest = {(line["model"], line["method"]): line for line in lines}
    if not newest:
        return ["# Fused kernels", "", "Nothing is measured."]
    names = list(dict.fromkeys(name for name, _ in newest))
    text = ["# Fused kernels beside eager's", "", machine_text(lines[-1]), ""]
    text += [*_targets(newest, names), ""]
    for name in names:
        own = [line for (model, _), line in newest.items() if model == name]
        text += [f"## {name}", "", *_table(own), ""]
    return text[:-1]


def _targets(newest: dict[tuple[str, str], Record], names: Sequence[str]) -> list[str]:
    fused = [line for line in newest.values() if line["method"].startswith("fused")]
    peaks = [
        (_place(line), line["peak_bytes"] / line["predicted_bytes"]) for line in newest.values()
    ]
    rows = [
        worst_row("measured peak over the predicted one", PREDICTED, peaks),
        all_row("measured peak within the budget",
                sum(line["peak_bytes"] <= line["budget_bytes"] for line in newest.values()),
                len(newest)),
        all_row("gradients of a fused plan equal those of the others, bitwise",
                sum(line["is_bitwise"] for line in fused), len(fused)),
        worst_row("error of a gradient against eager's, / 1e-5", 1.0,
                  [(_place(line), line["error"] / ERROR) for line in fused]),
        worst_row("peak without recomputation over that of eager's kernels", 1.0,
                  [(name, _peak(newest, name, "fused") / _peak(newest, name, "eager"))
                   for name in names]),
    ]  # fmt: skip
    for share, reach in TIME_AT.items():
        figures = [
            (name, newest[name, f"fused: {share}"]["ratio"])
            for name in names
            if name in BOUNDED and (name, f"fused: {share}") in newest
        ]
        rows.append(worst_row(f"time at {share} of eager's peak, GPT-2 and Llama", reach, figures))
    seconds = [(line["model"], line["compile_s"] / COMPILE_S) for line in fused]
    rows.append(worst_row("compilation / 40 s", 1.0, seconds))
    return targets(rows)


def _peak(newest: dict[tuple[str, str], Record], name: str, kernels: str) -> int:
    return newest[name, f"{kernels}: no recomputation"]["predicted_bytes"]


def _place(line: Record) -> str:
    return f"{line['model']}, {line['method']}"


def _table(lines: Sequence[Record]) -> list[str]:
    columns = (
        "kernels: budget", "peak / eager's", "measured - predicted", "time / eager's", "spread",
        "predicted ms", "recomputed", "gradient error",
    )  # fmt: skip
    rows = [
        (
            line["method"],
            f"{line['peak_bytes'] / line['eager_peak_bytes']:.3f}",
            f"{line['peak_bytes'] - line['predicted_bytes']:,} B",
            f"{line['ratio']:.3f}",
            f"{line['ratio_spread']:.3f}",
            f"{line['predicted_ms']:.1f}",
            str(line["num_recomputed"]),
            f"{line['error']:.0e}",
        )
        for line in lines
    ]
    first = lines[0]
    summary = (
        f"{first['num_places']} groups as {first['num_kernels']} kernels, compiled in "
        f"{first['compile_s']:.1f} s; eager's peak is {first['eager_peak_bytes'] / 1e6:.1f} MB."
    )
    return [summary, "", *table(columns, rows)]
