"""One model's comparison as a picture: markers for peers, one line for each of our strategies.

Needs matplotlib.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.comparison.result import OURS, ModelResult, Point

_STRATEGY_COLORS = {
    OURS: "#1f6fb4",
    "rotor": "#4f9a5b",
    "chen": "#c8822b",
    "checkmate": "#8a55a8",
    "none": "#2b2e33",
}
_MARKERS = {
    "eager": ("*", "#2b2e33"),
    "checkpoint": ("o", "#c8322b"),
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
    "offload": ("X", "#5b3a29"),
}
_INK = "#2b2e33"
_TOP_RATIO = 2.6
"""Largest ratio of the picture; a slower point is drawn at this edge."""


def save(result: ModelResult, path: Path) -> None:
    """Draws the model's timed points to a file.

    Args:
        result: With eager among its points.
        path: A file name that ends in .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    eager = result.eager
    assert eager is not None, "a picture is scaled by eager's peak"
    figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
    axes: Any = figure.subplots()
    _draw_ours(axes, result, eager.peak_bytes)
    for family, (marker, color) in _MARKERS.items():
        own = [point for point in result.peers if point.family == family]
        if own:
            xs, ys = _coordinates(own, eager.peak_bytes)
            axes.plot(
                xs,
                ys,
                marker,
                color=color,
                markersize=7,
                label=family,
                markerfacecolor="none" if family != "eager" else color,
            )
            for point, x, y in zip(own, xs, ys, strict=True):
                _label(axes, point, x, y, color)
    axes.set_xlim(0, None)
    axes.set_ylim(min(0.9, axes.get_ylim()[0]), None)
    axes.set_xlabel("measured activation peak, as a share of eager's", color=_INK)
    axes.set_ylabel("time of a step over eager's", color=_INK)
    axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(
        f"{result.name}: {eager.peak_bytes / 1e6:.4g} MB and {eager.ms:.4g} ms a step in eager",
        color=_INK,
    )
    figure.savefig(path, dpi=110)


def _draw_ours(axes: Any, result: ModelResult, eager_bytes: int) -> None:
    timed = [
        point for point in result.points if point.owner == "ours" and not math.isnan(point.ratio)
    ]
    for strategy, color in _STRATEGY_COLORS.items():
        own = sorted(
            (point for point in timed if point.family == strategy),
            key=lambda point: point.peak_bytes,
        )
        if own:
            xs, ys = _coordinates(own, eager_bytes)
            is_default = strategy == OURS
            label = f"ours: {strategy}"
            axes.plot(
                xs,
                ys,
                ".-",
                color=color,
                linewidth=2.2 if is_default else 1.0,
                markersize=8 if is_default else 6,
                label=label,
            )


def _coordinates(points: list[Point], eager_bytes: int) -> tuple[list[float], list[float]]:
    return [point.peak_bytes / eager_bytes for point in points], [
        min(point.ratio, _TOP_RATIO) for point in points
    ]


def _label(axes: Any, point: Point, x: float, y: float, color: str) -> None:
    setting = point.method.partition(": ")[2] or (
        "every layer" if point.family == "checkpoint" else ""
    )
    text = setting + (" (wrong gradients)" if point.is_wrong else "")
    if text:
        axes.annotate(
            text, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=6, color=color
        )
