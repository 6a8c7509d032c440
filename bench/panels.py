"""A picture of several panels, one for each model. Needs matplotlib."""

from __future__ import annotations

from typing import Any


def figure_of(
    num_panels: int, *, columns: int, width: float, height: float
) -> tuple[Any, list[Any]]:
    """A figure with panels in rows, and the panels in reading order.

    Args:
        num_panels: At least 1.
        columns: Most panels in a row.
        width: Of a panel, in inches.
        height: Of a panel, in inches.
    """
    from matplotlib.figure import Figure

    columns = min(columns, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(
        figsize=(width * columns, height * rows), layout="constrained", facecolor="white"
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels[num_panels:]:
        panel.set_visible(False)
    return figure, panels[:num_panels]
