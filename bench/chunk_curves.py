"""Predicted time over memory with and without chunks, for kinds of language models.

    python -m bench.chunk_curves           # writes bench/results/chunk_curves_cpu_<yyyymm>.*

The models are Hugging Face architectures with two layers and a large vocabulary, which sets their
peak as it does at full size. They return only their loss (`outputs="loss"`). Op times are estimated
for one CPU, so both curves have the same ones. Peak is that of the schedule without recomputation
and without chunks; shares and time ratios are relative to that schedule.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import command
from bench.command import Record
from bench.models import built, makers
from bench.pages import INK, OURS_COLOR, Line, about, filled, picture
from rockmate import InfeasibleBudgetError, Planner

_MACHINE, _SHARES = "cpu-avx2", (0.5, 0.25)
_MODELS = makers("chunked")


def measured(name: str, _: argparse.Namespace) -> Iterator[Record]:
    """Both curves of one model, as peaks in bytes and times in ms, and times at `_SHARES`."""
    workload = built(name, _MODELS[name])
    planners = [
        Planner(
            workload.model, workload.sample, outputs="loss", machine=_MACHINE, numerics=numerics
        )
        for numerics in ("bitwise", "any_order")
    ]
    plain = planners[0]
    yield {
        "model": name,
        "peak_bytes": plain.baseline_peak_bytes,
        "ms": plain.baseline_ms,
        "curves": [
            [(p.predicted_peak_bytes, p.predicted_ms) for p in planner.frontier()]
            for planner in planners
        ],
        "ratios": [
            [_ratio(planner, int(share * plain.baseline_peak_bytes), plain) for share in _SHARES]
            for planner in planners
        ],
    }


def _ratio(planner: Planner, budget_bytes: int, plain: Planner) -> float | None:
    try:
        return planner.plan(budget_bytes).predicted_ms / plain.baseline_ms
    except InfeasibleBudgetError:
        return None


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the least peaks as its headline."""
    newest = command.newest(records, "model")
    least = [record["curves"][1][0][0] / record["peak_bytes"] for record in newest]
    return filled(
        "chunk_curves",
        number=len(newest),
        least=min(least),
        most=max(least),
        shares=_SHARES,
        lines=newest,
        about=about(newest, __doc__),
    )


def _panel(record: Record) -> tuple[str, list[Line]]:
    lines = []
    for curve, color, label in zip(
        record["curves"], (INK, OURS_COLOR), ("without chunks", "with chunks"), strict=True
    ):
        points = [(b / record["peak_bytes"], ms / record["ms"]) for b, ms in curve]
        style = {"color": color, "marker": ".", "label": label}
        lines.append(Line([*points, (1.05, points[-1][1])], style, step="post"))
    return f"{record['model']}: {record['peak_bytes'] / 1e6:.3g} MB", lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans, and writes page and picture."""
    status, options = command.run_models(
        "chunk_curves", __doc__, arguments, measured, page, models=_MODELS, stem="chunk_curves_cpu"
    )
    newest = command.newest(command.read(command.lines_of(options)), "model")
    if not status:
        picture(
            Path(f"{options.output}.png"),
            dict(map(_panel, newest)),
            across="peak, as a share of the baseline's",
            up="predicted time over the baseline's",
            limits=(0.9, 2.5),
            columns=3,
            size=(4, 3),
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
