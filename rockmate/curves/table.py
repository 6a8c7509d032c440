"""Rows as a table: text for a terminal, HTML for a page or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rockmate.budget import size_text

_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        title: above its cells.
        cell: the text for a row.
        rank: where width is short, the columns of the highest rank go first; 0 always stays.
    """

    title: str
    cell: Callable[[Any], str]
    rank: int = 0


def table_text(
    columns: Sequence[Column],
    rows: Sequence[Any],
    note: Callable[[Any], str],
    *,
    width: int | None = None,
) -> str:
    """A line a row, with its note at the end.

    No line is wider than `width` characters, as long as columns of rank 0 and the notes fit.
    """
    notes = ["", *map(note, rows)]
    shown = list(columns)
    while True:
        cells = [[column.title, *map(column.cell, rows)] for column in shown]
        widths = [max(map(len, column)) for column in cells]
        total = sum(widths) + len(_GAP) * len(widths) + max(map(len, notes))
        last = max(shown, key=lambda column: column.rank)
        if width is None or total <= width or not last.rank:
            break
        shown.remove(last)
    lines = [
        _GAP.join([*map(str.rjust, line, widths), text]).rstrip()
        for *line, text in zip(*cells, notes, strict=True)
    ]
    lines.insert(1, _GAP.join("-" * size for size in widths))
    return "\n".join(lines)


def table_html(
    columns: Sequence[Column],
    rows: Sequence[Any],
    note: Callable[[Any], str],
    *,
    link: Callable[[Any], str] = lambda row: "",
) -> str:
    """The same as a `<table>`. `link` gives the address of a row's first cell, if it has one."""
    heads = (f"<th>{escape(column.title)}</th>" for column in columns)
    lines = [f"<tr>{''.join(heads)}<th></th></tr>"]
    for row in rows:
        first, *cells = [escape(column.cell(row)) for column in columns]
        first = f'<a href="{escape(link(row))}">{first}</a>' if link(row) else first
        inner = "".join(f"<td>{cell}</td>" for cell in [first, *cells, escape(note(row))])
        lines.append(f"<tr>{inner}</tr>")
    return f"<table>{''.join(lines)}</table>"


def sized(num_bytes: int | None) -> str:
    """A size; empty if unknown."""
    return "" if num_bytes is None else size_text(num_bytes)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number in a format; empty if unknown."""
    return "" if value is None else f"{value:{form}}{unit}"


def short_number(value: float | None) -> str:
    """A number in four digits, or all before the point; empty if unknown."""
    return number(value, ".4g" if value is None or value < 1000 else ",.0f")
