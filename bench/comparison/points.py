"""All points of a comparison as CSV, and those of a model as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.comparison.result import OURS, ModelResult, Point
from bench.pages import INK, PEER_COLOR, STRATEGIES, Line, filled, picture


def points_csv(results: Sequence[ModelResult]) -> str:
    """All methods of all models as CSV; one without a point has a note that says why."""
    return "\n".join(filled("points.csv", results=results)) + "\n"


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
        f"{result.name}: {size}",
        lines,
        across="measured activation peak, as a share of eager's",
        up="time of a step over eager's",
        limits=(min(0.9, *(y for line in lines for _, y in line.points)), None),
    )


def _setting(point: Point) -> str:
    setting = point.method.partition(": ")[2]
    if not setting and point.family == "checkpoint":
        setting = "every layer"
    return setting + (" (wrong gradients)" if point.is_wrong else "")
