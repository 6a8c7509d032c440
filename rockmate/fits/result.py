"""What `fit` found: its rows, as a table, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rockmate.budget import size_text
from rockmate.fits.row import PARTS, FitRow, size_of, speed_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """The sizes that fit a memory.

    `print` shows the table.

    Attributes:
        title: the model.
        memory_bytes: the memory.
        optimizer: name of the optimizer.
        axis: "batch" or "tokens": what varies.
        machine: that costs were estimated for; None if they were measured.
        offload: the memory tier that values may move to; None if nothing moves.
        rows: by size. The last one is the largest that fits.
        largest: the row of the largest size that fits.
        fastest: the row with the most samples a second, or tokens a second along "tokens".
        is_capped: whether the largest size is that of the search, or the model's number of
            positions, and not of the memory.
        timings: seconds by stage.
    """

    title: str
    memory_bytes: int
    optimizer: str
    axis: Literal["batch", "tokens"]
    machine: str | None
    rows: tuple[FitRow, ...]
    is_capped: bool
    timings: dict[str, float]
    offload: str | None = None

    @property
    def largest(self) -> FitRow:
        """See the class."""
        return next(row for row in self.rows if row.is_largest)

    @property
    def fastest(self) -> FitRow:
        """See the class."""
        return next(row for row in self.rows if row.is_fastest)

    def __str__(self) -> str:
        return "\n".join([self._heading(), "", _table(self), "", *self._remarks()])

    def to_json(self) -> str:
        """All of it as JSON, derived numbers included."""
        content = {name: getattr(self, name) for name in _FIELDS} | {
            "rows": [_row_content(row) for row in self.rows]
        }
        return json.dumps(content, indent=1)

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draws memory by part, and the speed, over the sizes.

        Args:
            path: of the picture; its suffix tells the format.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from rockmate.fits.picture import draw

        draw(
            Path(path),
            self.rows,
            title=self.title,
            memory_bytes=self.memory_bytes,
            axis=self.axis,
        )

    def _heading(self) -> str:
        how = f"estimated for {self.machine}" if self.machine else "measured here"
        moves = f", values may move to {self.offload}" if self.offload else ""
        memory = size_text(self.memory_bytes)
        return f"{self.title}\n{memory}, {self.optimizer}, times {how}{moves}"

    def _remarks(self) -> list[str]:
        largest, fastest = self.largest, self.fastest
        what = "batch" if self.axis == "batch" else "sequence"
        least = "at least " if self.is_capped else ""
        lines = [
            f"largest {what}: {least}{size_of(self.axis, largest)}, "
            f"{size_text(largest.total_bytes)}, {largest.overhead:+.1%} time, "
            f"{_speed_text(self, largest)}"
        ]
        if fastest is largest:
            return [*lines, f"the largest {what} is also the fastest"]
        return [
            *lines,
            f"fastest {what}: {size_of(self.axis, fastest)}, {size_text(fastest.total_bytes)}, "
            f"{fastest.overhead:+.1%} time, {_speed_text(self, fastest)}",
        ]


_FIELDS = (
    "title", "memory_bytes", "optimizer", "axis", "machine", "offload", "is_capped", "timings",
)  # fmt: skip
_DERIVED = ("peak_bytes", "total_bytes", "overhead", "samples_per_s", "tokens_per_s")


def _row_content(row: FitRow) -> dict[str, Any]:
    return asdict(row) | {name: getattr(row, name) for name in _DERIVED}


def _speed_text(fit: Fit, row: FitRow) -> str:
    unit = "samples" if fit.axis == "batch" else "tokens"
    return f"{speed_of(fit.axis, row):,.4g} {unit}/s"


def _table(fit: Fit) -> str:
    columns: list[tuple[str, Callable[[FitRow], str]]] = [
        ("batch" if fit.axis == "batch" else "tokens", lambda row: f"{size_of(fit.axis, row):,}"),
        ("total", lambda row: size_text(row.total_bytes)),
        *(
            (title, lambda row, name=name: _short(getattr(row, name)))
            for name, title in PARTS.items()
        ),
        *([("moved away", lambda row: _short(row.host_bytes))] if fit.offload else []),
        ("time", lambda row: f"{row.predicted_ms:,.4g} ms"),
        ("overhead", lambda row: f"{row.overhead:+.1%}"),
    ]
    if any(row.measured_ms is not None for row in fit.rows):
        columns += [
            ("measured", lambda row: f"{row.step_ms:,.4g} ms"),
            ("measured peak", lambda row: _short(row.measured_peak_bytes or 0)),
        ]
    unit = "samples/s" if fit.axis == "batch" else "tokens/s"
    columns += [(unit, lambda row: f"{speed_of(fit.axis, row):,.4g}")]
    cells = [
        [title for title, _ in columns],
        *([cell(row) for _, cell in columns] for row in fit.rows),
    ]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]
    notes = ["", *map(_note, fit.rows)]
    lines = [f"{line}  {note}".rstrip() for line, note in zip(lines, notes, strict=True)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _short(num_bytes: int) -> str:
    return size_text(num_bytes) if num_bytes else "0"


def _note(row: FitRow) -> str:
    notes = [
        *(["<- largest"] if row.is_largest else []),
        *(["<- fastest"] if row.is_fastest else []),
        *([f"in chunks ({row.loss_chunks})"] if row.loss_chunks else []),
    ]
    return ", ".join(notes)
