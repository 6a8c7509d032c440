"""Rows along one axis, budgets or sizes, as a table, JSON and a picture."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from rockmate._util import write_whole
from rockmate.curves.figures import save_figure, svg
from rockmate.curves.measure import Measurement
from rockmate.curves.table import Column, table_html, table_text
from rockmate.extras import MissingExtraError


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow(Measurement):
    """A point of a curve: a plan, and what its steps took where they were measured.

    Attributes:
        loss_chunks: the chunks that the step runs in; empty if it is whole.
    """

    loss_chunks: str = ""

    def __repr__(self) -> str:
        unset = {each.name: each.default for each in fields(self)}
        given = {name: value for name, value in self.as_dict().items() if value != unset[name]}
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in given.items())})"

    def with_measurement(self, measured: Measurement) -> Self:
        """The row with what was measured."""
        return replace(self, **asdict(measured))

    def as_dict(self) -> dict[str, Any]:
        """The attributes by name, what was measured last."""
        return {name: getattr(self, name) for name in self.names()}

    @classmethod
    def names(cls) -> list[str]:
        """Of the attributes, in the order of `as_dict`."""
        measured = {each.name for each in fields(Measurement)}
        return sorted((each.name for each in fields(cls)), key=measured.__contains__)


Row = TypeVar("Row", bound=CurveRow)


class Curve(Sequence[Row], ABC):
    """The rows of a model along one axis, in their order.

    `print` shows a table, and a notebook the table and the picture. `pandas.DataFrame(curve)` makes
    a data frame.

    Attributes:
        title: the model and its sample.
        rows: the points of the curve.
        timings: seconds by stage.
    """

    title: str
    rows: Sequence[Row]
    timings: dict[str, float]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The table, and the picture where matplotlib is installed."""
        try:
            picture = svg(self.figure(), self.title)
        except MissingExtraError:
            picture = ""
        return picture + table_html(self.columns(), self.rows, self.note)

    def text(self, width: int | None = None) -> str:
        """What `print` shows, the table in lines of at most `width` characters."""
        table = table_text(self.columns(), self.rows, self.note, width=width)
        return "\n\n".join(filter(None, [self.heading(), table, self.remarks()]))

    @property
    def seconds_text(self) -> str:
        """The timings in words."""
        return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.timings.items())

    def to_json(self) -> str:
        """All rows and what they hold for, as JSON."""
        rows = [row.as_dict() for row in self.rows]
        return json.dumps({**self.facts(), "timings": self.timings, "rows": rows}, indent=1)

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        write_whole(path, self.to_json() + "\n")

    def plot(self, path: str | Path) -> None:
        """Draws the curve.

        Args:
            path: of the picture; its suffix tells the format.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        save_figure(self.figure(), path)

    @abstractmethod
    def heading(self) -> str:
        """The lines above the table."""

    @abstractmethod
    def columns(self) -> list[Column]:
        """The columns of the table."""

    @abstractmethod
    def note(self, row: Any) -> str:
        """What the table says behind a row."""

    @abstractmethod
    def remarks(self) -> str:
        """The lines below the table."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the rows hold for, as JSON has it."""

    @abstractmethod
    def figure(self) -> Any:
        """The picture, as a figure of matplotlib."""
