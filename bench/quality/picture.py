"""The frontier of each strategy on one model, with the lower bound, as a picture.

Needs matplotlib. Draws on a figure of its own and leaves matplotlib's global state alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_COLORS = {
    "chen": "#c8822b",
    "rotor": "#4f9a5b",
    "checkmate": "#8a55a8",
    "rockmate": "#1f6fb4",
    "none": "#2b2e33",
}
_BOUND_COLOR = "#c8322b"
_INK = "#2b2e33"
_TOP_RATIO = 2.0
"""Largest ratio of the picture; plans at the smallest peaks may be slower."""


def save(records: Sequence[Record], path: Path) -> None:
    """Writes the picture of one model's records.

    A strategy's curve is a step function: the time at a budget is that of its fastest plan for no
    more. So is the bound's: it holds for every smaller budget.

    Args:
        records: Of one model, the one of kind `model` first; see `bench.quality`.
        path: A file name that ends in .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    model, plans = records[0], [r for r in records if r["kind"] == "plan" and r["is_feasible"]]
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    axes: Any = figure.subplots()
    for strategy, color in _COLORS.items():
        curve = _frontier(model, plans, strategy)
        if curve:
            shares, ratios = [share for share, _ in curve], [ratio for _, ratio in curve]
            axes.step(
                [*shares, 1.05],
                [*ratios, ratios[-1]],
                where="post",
                color=color,
                linewidth=1.4,
                label=strategy,
            )
            axes.plot(shares, ratios, ".", color=color, markersize=4)
    axes.step(
        *_scaled(model["lower_bounds"], model),
        where="pre",
        color=_BOUND_COLOR,
        linewidth=1.2,
        linestyle=(0, (5, 3)),
        label="lower bound",
    )
    axes.set_xlim(0, 1.05)
    axes.set_ylim(0.98, _TOP_RATIO)
    axes.set_xlabel("peak, as a share of the baseline's", color=_INK)
    axes.set_ylabel("predicted time over the baseline's", color=_INK)
    axes.legend(frameon=False, labelcolor=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    megabytes = model["baseline_peak_bytes"] / 1e6
    baseline = f"baseline {megabytes:.4g} MB and {model['baseline_ms']:.4g} ms"
    axes.set_title(f"{model['model']}: {baseline}", color=_INK)
    figure.savefig(path, dpi=110)


def _frontier(model: Record, plans: Sequence[Record], strategy: str) -> list[tuple[float, float]]:
    """Share of the peak and time ratio of the strategy's points that no other one dominates."""
    points = {(budget_bytes, ms) for budget_bytes, ms in model["frontiers"].get(strategy, ())}
    points |= {(r["peak_bytes"], r["ms"]) for r in plans if r["strategy"] == strategy}
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return list(zip(*_scaled(best, model), strict=True))


def _scaled(
    points: Sequence[tuple[float, float]], model: Record
) -> tuple[list[float], list[float]]:
    return [num_bytes / model["baseline_peak_bytes"] for num_bytes, _ in points], [
        ms / model["baseline_ms"] for _, ms in points
    ]
