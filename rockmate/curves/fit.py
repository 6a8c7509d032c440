"""What a fit found: a row for each size that a memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rockmate.budget import size_text
from rockmate.curves.curve import Curve
from rockmate.curves.fit_row import PARTS, FitRow
from rockmate.curves.picture import fit_figure
from rockmate.curves.table import Column, short_number


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit(Curve[FitRow]):
    """The sizes that fit a memory.

    `print` shows a table, and a notebook the table and the picture. It is a sequence of its rows:
    `pandas.DataFrame(fit)` makes a data frame.

    Attributes:
        title: the model.
        memory_bytes: the memory.
        optimizer: name of the optimizer.
        axis: "batch" or "tokens": what varies.
        machine: that costs were estimated for; None if they were measured.
        margin_bytes: what every size leaves free for the allocator; a part of `device_bytes`.
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
    margin_bytes: int = 0
    offload: str | None = None

    @property
    def largest(self) -> FitRow:
        """See the class."""
        return next(row for row in self.rows if row.is_largest)

    @property
    def fastest(self) -> FitRow:
        """See the class."""
        return next(row for row in self.rows if row.is_fastest)

    # --- as a table, JSON and a picture ---

    def heading(self) -> str:
        """See `Curve`."""
        how = f"estimated for {self.machine}" if self.machine else "measured here"
        moves = f", values may move to {self.offload}" if self.offload else ""
        memory = size_text(self.memory_bytes)
        if self.margin_bytes:
            memory += f" with a margin of {size_text(self.margin_bytes)} for the allocator"
        return f"{self.title}\n{memory}, {self.optimizer}, times {how}{moves}"

    def columns(self) -> list[Column]:
        """See `Curve`."""
        columns = [
            Column(self.axis, lambda row: f"{row.size(self.axis):,}"),
            Column("total", lambda row: size_text(row.total_bytes)),
            *(
                Column(title, lambda row, name=name: _short(getattr(row, name)))
                for name, title in PARTS.items()
            ),
        ]
        if self.offload:
            columns.append(Column("moved away", lambda row: _short(row.host_bytes)))
        columns += [
            Column("time", lambda row: f"{short_number(row.predicted_ms)} ms"),
            Column("overhead", lambda row: f"{row.overhead:+.1%}"),
        ]
        if any(row.is_measured for row in self.rows):
            columns += [
                Column("measured", lambda row: f"{short_number(row.step_ms)} ms"),
                Column("measured peak", lambda row: _short(row.measured_peak_bytes or 0)),
            ]
        return [*columns, Column(f"{self.unit}/s", lambda row: short_number(row.speed(self.axis)))]

    def note(self, row: FitRow) -> str:
        """See `Curve`."""
        notes = (
            "<- largest" if row.is_largest else "",
            "<- fastest" if row.is_fastest else "",
            f"in chunks ({row.loss_chunks})" if row.loss_chunks else "",
        )
        return ", ".join(filter(None, notes))

    def remarks(self) -> str:
        """See `Curve`."""
        what = "batch" if self.axis == "batch" else "sequence"
        least = "at least " if self.is_capped else ""
        first = f"largest {what}: {least}{self._remark(self.largest)}"
        if self.fastest is self.largest:
            return f"{first}\nthe largest {what} is also the fastest"
        return f"{first}\nfastest {what}: {self._remark(self.fastest)}"

    def _remark(self, row: FitRow) -> str:
        return (
            f"{row.size(self.axis)}, {size_text(row.total_bytes)}, {row.overhead:+.1%} time, "
            f"{short_number(row.speed(self.axis))} {self.unit}/s"
        )

    @property
    def unit(self) -> str:
        """What speeds count."""
        return "samples" if self.axis == "batch" else "tokens"

    def facts(self) -> dict[str, Any]:
        """See `Curve`."""
        names = (
            "title", "memory_bytes", "margin_bytes", "optimizer", "axis", "machine", "offload",
            "is_capped",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def figure(self) -> Any:
        """See `Curve`."""
        return fit_figure(
            self.rows, title=self.title, memory_bytes=self.memory_bytes, axis=self.axis
        )


def _short(num_bytes: int) -> str:
    return size_text(num_bytes) if num_bytes else "0"
