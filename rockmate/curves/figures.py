"""Figures of matplotlib, an optional package, and SVG that can stand in an HTML page.

Figures are drawn apart, and matplotlib's global state is left alone. A figure is as wide as a phone
shows it, so that its text can be read there.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path
from typing import Any

from rockmate._util import write_whole
from rockmate.extras import require

_WIDTH = 5.6  # inches
_STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e6ea",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "rockmate",
}


def svg(figure: Any, title: str) -> str:
    """A figure as SVG that can stand in an HTML page, with names of its own.

    `title` tells what it shows to those who do not see it. The names are of it, too.
    """
    file = io.StringIO()
    with style():
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Type")))
    text = file.getvalue()
    own = f"p{zlib.crc32((title + text).encode()):x}-"
    out = r"<metadata>.*?</metadata>|\sxmlns(:\w+)?=\"[^\"]*\"|\starget=\"_blank\""
    text = re.sub(out, "", text, flags=re.DOTALL)
    text = re.sub(r"(\sid=\"|href=\"#|url\(#)(?!budget-)", rf"\g<1>{own}", text)
    return text[text.index("<svg") :].replace(
        "<svg", f'<svg role="img" aria-label="{escape(title)}"', 1
    )


def save_figure(figure: Any, path: str | Path) -> None:
    """Writes a figure in the format that the suffix names, PNG without one."""
    file, path = io.BytesIO(), Path(path)
    path = path if path.suffix else path.with_suffix(".png")
    figure.savefig(file, format=path.suffix[1:], dpi=150)
    write_whole(path, file.getvalue())


def style() -> AbstractContextManager[None]:
    """What figures are made and written in."""
    matplotlib = require("matplotlib", extra="plot", purpose="the picture of a curve")
    return matplotlib.rc_context(_STYLE)


def new_figure(height: float) -> Any:
    """An empty figure of so many inches."""
    figures = require("matplotlib.figure", extra="plot", purpose="the picture of a curve")
    return figures.Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")


def add_legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend below all axes."""
    handles = [handle for each in axes for handle in each.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")


def unit_of(most_bytes: int) -> tuple[int, str]:
    """Bytes and name of the unit for an axis that reaches so far."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most_bytes >= 1024**power:
            return 1024**power, name
    return 1, "bytes"
