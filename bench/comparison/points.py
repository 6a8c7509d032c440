"""All points of a comparison as CSV: one row for each method of each model, measured or not."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from bench.comparison.lines import Record, by_model
from bench.comparison.page import number_text
from bench.comparison.result import Match, ModelResult, Point

COLUMNS: tuple[str, ...] = (
    "model",
    "method",
    "owner",
    "peak_mb",
    "peak_of_eager",
    "resident_mb",
    "time_over_eager",
    "spread",
    "ms",
    "prepared_s",
    "gradient_difference",
    "budget_mb",
    "our_peak_mb",
    "our_time_over_eager",
    "is_dominated",
    "note",
)


def points_csv(records: Sequence[Record]) -> str:
    """The text of the file; a method without a point has a note that says why."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for name, own in by_model(records).items():
        writer.writerows(_rows(ModelResult(name, own)))
    return text.getvalue()


def _rows(result: ModelResult) -> Iterator[dict[str, str]]:
    matches = {match.peer.method: match for match in result.matches}
    for point in sorted(
        result.points, key=lambda point: (point.owner != "peer", -point.peak_bytes)
    ):
        yield {"model": result.name, **_point_cells(result, point)} | _match_cells(
            matches.get(point.method)
        )
    for record in result.records:
        note = _note(record)
        if note:
            owner = record.get("owner", "peer")
            yield {"model": result.name, "method": record["method"], "owner": owner, "note": note}


def _point_cells(result: ModelResult, point: Point) -> dict[str, str]:
    eager = result.eager
    return {
        "method": point.method,
        "owner": point.owner,
        "peak_mb": _megabytes(point.peak_bytes),
        "peak_of_eager": f"{point.peak_bytes / eager.peak_bytes:.4f}" if eager else "",
        "resident_mb": _megabytes(point.resident_bytes),
        "time_over_eager": number_text(point.ratio, ".4f"),
        "spread": number_text(point.spread, ".4f"),
        "ms": number_text(point.ms, ".1f"),
        "prepared_s": f"{point.prepare_s:.1f}",
        "gradient_difference": f"{point.gradient_difference:.1e}"
        if point.gradient_difference
        else "0",
        "budget_mb": _megabytes(point.budget_bytes),
    }


def _match_cells(match: Match | None) -> dict[str, str]:
    if match is None:
        return {}
    ours = match.ours
    cells = {"is_dominated": "yes" if match.is_dominated else "no"}
    if ours is None:
        return cells
    own = {"our_peak_mb": _megabytes(ours.peak_bytes), "our_time_over_eager": f"{ours.ratio:.4f}"}
    return cells | own


def _note(record: Record) -> str:
    match record["kind"]:
        case "point":
            return f"the same as {record['same_as']}" if record["same_as"] is not None else ""
        case "failed":
            return f"failed: {record['error']}"
        case "skipped":
            return f"skipped: {record['why']}"
        case "infeasible":
            budget, least = _megabytes(record["budget_bytes"]), _megabytes(record["minimum_bytes"])
            return f"infeasible: {budget} MB is below the strategy's smallest peak, {least} MB"
        case _:
            return ""


def _megabytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.3f}"
