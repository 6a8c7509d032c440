"""The page of plan quality: the headline, the targets, the models, the notes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.pages import Start, provenance, table, targets
from bench.quality.notes import notes
from bench.quality.records import Record, Records, percent
from bench.quality.targets import LARGEST_GAP, rows


def page(records: Sequence[Record]) -> list[str]:
    """The page's lines."""
    lines = Records(records)
    return [
        "# How good plans are",
        "",
        *_headline(lines, is_tiny=records[0]["tiny"]),
        "",
        *targets(row.cells for row in rows(records)),
        "",
        *provenance([Start(model=r["model"], command=r["command"], machine=r) for r in records]),
        "",
        *_models(lines),
        "",
        *notes(lines),
        "",
        "## How it was measured",
        "",
        "No step is run. Times are sums of op times, each measured alone, and peaks are simulated. "
        "The baseline is the schedule without recomputation. A budget is a fraction of its peak, a "
        "gap a fraction of its time. MB are millions of bytes. The step returns its outputs and "
        "has its loss unchunked, unless a row says otherwise.",
    ]


def _headline(lines: Records, *, is_tiny: bool) -> list[str]:
    gaps = [gap for own in lines.gaps_of_models().values() for gap in own.values()]
    text = "Plans beside a lower bound that no schedule beats, with measured op times."
    if is_tiny:
        text = "Plans of tiny models beside a lower bound: a rehearsal."
    if not gaps:
        return [text]
    num_near = sum(gap <= LARGEST_GAP for gap in gaps)
    return [
        text,
        "",
        f"**{num_near} of {len(gaps)} plans are within {100 * LARGEST_GAP:g} % of the lower bound; "
        f"the median gap is {percent(statistics.median(gaps))} of a step.**",
    ]


def _models(lines: Records) -> list[str]:
    columns = (
        *("model", "ops", "baseline MB", "baseline ms", "gap, largest", "at", "gap, median"),
        *("infeasible", "smallest peak", "proved", "of Rotor's", "of Rotor's, in chunks"),
        *("beyond the knapsack, most", "capture s", "costs s", "solve s", "first plan s"),
    )
    return [
        "## Model by model",
        "",
        "Peaks are fractions of the baseline's. An infeasible budget is one below the smallest "
        "peak. Nothing fits below the proved one.",
        "",
        *table(columns, [_model_row(lines, model) for model in lines.models]),
    ]


def _model_row(lines: Records, model: str) -> list[str]:
    record = lines.models[model]
    spent = record["timings_s"]
    return [
        model,
        str(record["num_ops"]),
        f"{record['baseline_peak_bytes'] / 1e6:.1f}",
        f"{record['baseline_ms']:.0f}",
        *_gap_cells(lines.gaps(model)),
        ", ".join(f"{budget:g}" for budget in lines.infeasible(model)),
        *_peak_cells(record),
        _knapsack_cell(lines, model),
        *(f"{spent[stage]:.1f}" for stage in ("capture", "costs", "solve")),
        f"{record['first_plan_s']:.2f}",
    ]


def _gap_cells(gaps: dict[float, float]) -> list[str]:
    if not gaps:
        return ["", "", ""]
    at = max(gaps, key=lambda budget: gaps[budget])
    return [percent(gaps[at]), f"{at:g}", percent(statistics.median(gaps.values()))]


def _peak_cells(record: Record) -> list[str]:
    if "minimum_peak_bytes" not in record:
        return [""] * 4
    minimum, chunked = record["minimum_peak_bytes"], record["loss_only_minimum_bytes"]
    baseline = record["baseline_peak_bytes"]
    return [
        f"{minimum['rockmate'] / baseline:.3f}",
        f"{record['proved_minimum_bytes'] / baseline:.3f}",
        *(f"{least['rockmate'] / least['rotor']:.3f}" for least in (minimum, chunked)),
    ]


def _knapsack_cell(lines: Records, model: str) -> str:
    beyond = [
        r["ours_ms"] / r["ms"] - 1
        for r in lines.yardsticks
        if r["model"] == model and r["ours_ms"] is not None
    ]
    return percent(max(beyond)) if beyond else ""
