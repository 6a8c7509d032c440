"""The picture of a fit: memory by part, and the speed, at each size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rockmate.budget import size_text
from rockmate.extras import require
from rockmate.fits.row import PARTS, FitRow, size_of, speed_of

_GIB = 1 << 30
_COLOURS = ("#bbbbbb", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")


def draw(path: Path, rows: Sequence[FitRow], *, title: str, memory_bytes: int, axis: str) -> None:
    """Writes the picture of a fit to a file; errors as for `Fit.plot`.

    Args:
        path: of the picture.
        rows: by size.
        title: the model.
        memory_bytes: the memory.
        axis: "batch" or "tokens".
    """
    figures: Any = require("matplotlib.figure", extra="plot", purpose="the picture of a fit")
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    below = [0.0] * len(rows)
    for (name, part), colour in zip(PARTS.items(), _COLOURS, strict=True):
        heights = [getattr(row, name) / _GIB for row in rows]
        axes.bar(places, heights, bottom=below, label=part, color=colour, width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.axhline(
        memory_bytes / _GIB,
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"memory {size_text(memory_bytes)}",
    )
    axes.set_ylim(top=1.05 * memory_bytes / _GIB)
    axes.set_xticks(places, [f"{size_of(axis, row):,}" for row in rows])
    axes.set_xlabel("rows in a batch" if axis == "batch" else "tokens in a sequence")
    axes.set_ylabel("GiB at the peak of a step")
    speeds = axes.twinx()
    unit = "samples" if axis == "batch" else "tokens"
    speeds.plot(
        places,
        [speed_of(axis, row) for row in rows],
        color="black",
        marker="o",
        label=f"{unit} a second",
    )
    speeds.set_ylim(bottom=0)
    speeds.set_ylabel(f"{unit} a second")
    handles, labels = (
        first + second
        for first, second in zip(
            axes.get_legend_handles_labels(), speeds.get_legend_handles_labels(), strict=True
        )
    )
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    axes.set_title(title, fontsize="medium", wrap=True)
    figure.savefig(path, dpi=150)
