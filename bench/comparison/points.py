"""All points of a comparison as CSV, and those of a model as a picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.command import Record
from bench.comparison.result import OURS, ModelResult, Point
from bench.pages import INK, PEER_COLOR, STRATEGIES, Line, picture


def points_csv(results: Iterable[ModelResult]) -> str:
    """All methods of all models as CSV; one without a point has a note that says why."""
    text = io.StringIO()
    rows = [row for result in results for row in _rows(result)]
    columns = [
        *("model", "method", "owner", "peak_mb", "peak_of_eager", "resident_mb"),
        *("time_over_eager", "spread", "ms", "prepared_s", "gradient_difference", "budget_mb"),
        *("our_peak_mb", "our_time_over_eager", "is_dominated", "note"),
    ]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _rows(result: ModelResult) -> Iterator[dict[str, str]]:
    matches = {match.peer.method: match for match in result.matches}
    eager = result.eager
    for point in sorted(result.points, key=lambda each: (each.owner != "peer", -each.peak_bytes)):
        difference = point.gradient_difference
        row = {
            "model": result.name,
            "method": point.method,
            "owner": point.owner,
            "peak_mb": _exact(point.peak_bytes),
            "peak_of_eager": f"{point.peak_bytes / eager.peak_bytes:.4f}" if eager else "",
            "resident_mb": _exact(point.resident_bytes),
            "time_over_eager": _number(point.ratio, ".4f"),
            "spread": _number(point.spread, ".4f"),
            "ms": _number(point.ms, ".1f"),
            "prepared_s": f"{point.prepare_s:.1f}",
            "gradient_difference": f"{difference:.1e}" if difference else "0",
            "budget_mb": _exact(point.budget_bytes),
        }
        match = matches.get(point.method)
        if match:
            row["is_dominated"] = "yes" if match.is_dominated else "no"
        if match and match.ours:
            row["our_peak_mb"] = _exact(match.ours.peak_bytes)
            row["our_time_over_eager"] = f"{match.ours.ratio:.4f}"
        yield row
    for record in result.records:
        note = _note(record)
        if note:
            owner = record.get("owner", "peer")
            yield {"model": result.name, "method": record["method"], "owner": owner, "note": note}


def _note(record: Record) -> str:
    match record["kind"]:
        case "point":
            return f"the same as {record['same_as']}" if record["same_as"] is not None else ""
        case "failed":
            return f"failed: {record['error']}"
        case "skipped":
            return f"skipped: {record['why']}"
        case "infeasible":
            budget, least = _exact(record["budget_bytes"]), _exact(record["minimum_bytes"])
            return f"infeasible: {budget} MB is below the strategy's smallest peak, {least} MB"
        case _:
            return ""


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _exact(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.3f}"


# --- picture ----------------------------------------------------------------------------------

_MARKERS = {
    "eager": ("*", INK),
    "checkpoint": ("o", PEER_COLOR),
    "sqrt(n) segments": ("s", "#d9822b"),
    "checkpoint_sequential": ("D", "#b8a12e"),
    "selective": ("^", "#8a55a8"),
    "default partitioner": ("P", "#6b7280"),
    "min-cut": ("v", "#0f8b8d"),
    "min-cut by layer": (">", "#d1495b"),
    "inductor": ("p", "#3a5a40"),
    "inductor by layer": ("h", "#588157"),
    "inductor, checkpoints": ("<", "#a3b18a"),
    "inductor by layer, checkpoints": ("d", "#344e41"),
}
_TOP_RATIO = 2.6
"""Largest ratio of the picture; a slower point is drawn at this edge."""


def save_picture(result: ModelResult, path: Path) -> None:
    """Draws the model's timed points: markers for peers, a line for each of our strategies."""
    eager = result.eager
    assert eager is not None, "a picture is scaled by eager's peak"

    def places(points: Iterable[Point]) -> list[tuple[float, float]]:
        return [(p.peak_bytes / eager.peak_bytes, min(p.ratio, _TOP_RATIO)) for p in points]

    lines = []
    for strategy, color in (STRATEGIES | {"none": INK}).items():
        own = [p for p in result.points if p.owner == "ours" and p.family == strategy]
        timed = sorted((p for p in own if not math.isnan(p.ratio)), key=lambda p: p.peak_bytes)
        width = 2.2 if strategy == OURS else 1.0
        style = {"color": color, "marker": ".", "linewidth": width, "label": f"ours: {strategy}"}
        lines += [Line(places(timed), style)] if timed else []
    for family, (marker, color) in _MARKERS.items():
        own = [point for point in result.peers if point.family == family]
        style = {"color": color, "marker": marker, "linestyle": "", "label": family}
        words = [_setting(point) for point in own]
        lines += [Line(places(own), style, words=words)] if own else []
    size = f"{eager.peak_bytes / 1e6:.4g} MB and {eager.ms:.4g} ms a step in eager"
    picture(
        path,
        {f"{result.name}: {size}": lines},
        across="measured activation peak, as a share of eager's",
        up="time of a step over eager's",
        limits=(min(0.9, *(y for line in lines for _, y in line.points)), None),
        size=(9, 6),
    )


def _setting(point: Point) -> str:
    setting = point.method.partition(": ")[2]
    if not setting and point.family == "checkpoint":
        setting = "every layer"
    return setting + (" (wrong gradients)" if point.is_wrong else "")
