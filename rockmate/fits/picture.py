"""The picture of a fit: memory by part, and the speed, at each size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rockmate.budget import size_text
from rockmate.extras import require
from rockmate.fits.result import Fit, size_of, speed_of
from rockmate.fits.row import PARTS

_GIB = 1 << 30
_COLOURS = ("#bbbbbb", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")


def draw(fit: Fit, path: Path) -> None:
    """Writes the picture of a fit to a file; errors as for `Fit.plot`."""
    figures: Any = require("matplotlib.figure", extra="plot", purpose="the picture of a fit")
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(fit.rows))
    below = [0.0] * len(fit.rows)
    for (name, title), colour in zip(PARTS.items(), _COLOURS, strict=True):
        heights = [getattr(row, name) / _GIB for row in fit.rows]
        axes.bar(places, heights, bottom=below, label=title, color=colour, width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.axhline(
        fit.memory_bytes / _GIB,
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"memory {size_text(fit.memory_bytes)}",
    )
    axes.set_xticks(places, [f"{size_of(fit, row):,}" for row in fit.rows])
    axes.set_xlabel("rows in a batch" if fit.axis == "batch" else "tokens in a sequence")
    axes.set_ylabel("GiB at the peak of a step")
    speeds = axes.twinx()
    unit = "samples" if fit.axis == "batch" else "tokens"
    speeds.plot(
        places,
        [speed_of(fit.axis, row) for row in fit.rows],
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
    axes.set_title(fit.title.split(", ")[0], fontsize="medium")
    figure.savefig(path, dpi=150)
