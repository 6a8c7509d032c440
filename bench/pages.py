"""The parts of all pages: tables, targets, numbers, and where the lines come from.

A page is a file of `bench/templates` with its parts filled in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from bench.machine import hardware_text, machine_text, versions_text

Record = Mapping[str, Any]


def filled(template: str, **parts: Any) -> list[str]:
    """The lines of a page.

    Templates are Jinja's. Beside what that has, they have the filters `as`, a format that leaves
    None and NaN empty, `mb`, as `megabytes`, `kib`, and `where`, the records for which an
    expression of `r` is true; and functions that give rows of targets: `every`, `worst` and
    `target`. Lists stand for their lines, and a paragraph without text leaves no gap.

    Args:
        template: name of a file in `bench/templates`; without an ending, of Markdown.
        **parts: by name.
    """
    name = template if "." in template else f"{template}.md"
    text = _TEMPLATES.get_template(name).render(**parts)
    return re.sub(r"\n{3,}", "\n\n", text).strip().split("\n")


def _of_record(expression: str) -> Callable[[Any], Any]:
    """The value of an expression of a record `r`, or of `r` alone, as templates have them."""
    found = _TEMPLATES.compile_expression(expression)
    return lambda record: found(r=record)


def _where(records: Iterable[Any], expression: str) -> list[Any]:
    return [record for record in records if _of_record(expression)(record)]


def _every(records: Sequence[Any], what: str, expression: str) -> str:
    """The row of a target that is hit if an expression is true for every record."""
    num_hit, number = len(_where(records, expression)), len(records)
    is_hit = num_hit == number if number else None
    return Target(what, "all", f"{num_hit} of {number}", "", is_hit).text


def _worst(
    records: Sequence[Any], what: str, limit: float, figure: str, place: str, **options: Any
) -> str:
    """The row of a target that the largest figure has to hit; figure and place are expressions."""
    name, value = _of_record(place), _of_record(figure)
    figures = [(str(name(each)), value(each)) for each in records]
    return worst_row(what, limit, figures, **options).text


def _as_text(part: Any) -> Any:
    return "\n".join(part) if isinstance(part, list) else "" if part is None else part


def _formatted(value: Any, form: str) -> str:
    is_there = value is not None and not isinstance(value, jinja2.Undefined) and value == value
    return format(value, form) if is_there else ""


def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_as_text,
        undefined=jinja2.ChainableUndefined,
    )
    kib: Callable[[int], str] = lambda size: f"{size / 1024:,.1f}"  # noqa: E731
    made.filters |= {"as": _formatted, "mb": megabytes, "kib": kib, "where": _where}
    made.globals |= {"every": _every, "worst": _worst}
    made.globals["target"] = lambda *cells: Target(*cells).text
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table with these columns."""
    return [table_row(columns), "|" + "---|" * len(columns), *map(table_row, rows)]


def table_row(cells: Sequence[str]) -> str:
    """One row of a table."""
    return f"| {' | '.join(cells)} |"


def megabytes(num_bytes: int | None) -> str:
    """Millions of bytes, to at least four digits; empty for None."""
    if not isinstance(num_bytes, int):
        return ""
    return f"{num_bytes / 1e6:.1f}" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.4g}"


# --- targets ----------------------------------------------------------------------------------


class Target(NamedTuple):
    """One target with its figure: a row of the table of targets.

    Attributes:
        what: The quantity.
        reach: Its target.
        figure: The measured value; empty if nothing was measured.
        where: Of the figure.
        is_hit: None if nothing was measured, which is neither hit nor missed.
    """

    what: str
    reach: str
    figure: str = ""
    where: str = ""
    is_hit: bool | None = None

    @property
    def verdict(self) -> str:
        """In words."""
        return {None: "not measured", True: "hit", False: "**miss**"}[self.is_hit]

    @property
    def text(self) -> str:
        """The row."""
        return table_row([*self[:4], self.verdict])


def worst_row(
    what: str,
    limit: float,
    figures: Sequence[tuple[str, float]],
    *,
    reach: str = "",
    percent: bool = False,
    counts: bool = False,
) -> Target:
    """A target that the largest figure has to hit; a figure stands with its place.

    Args:
        what: The quantity.
        limit: What the figure may be at most.
        figures: Place and figure of each case.
        reach: The limit as a text.
        percent: Whether the figure is a share, to be given in percent.
        counts: Whether the row says how many figures are within the limit.
    """
    reach = reach or f"<= {limit:.2f}"
    if not figures:
        return Target(what, reach)
    where, worst = max(figures, key=lambda pair: pair[1])
    if counts:
        where += f"; {sum(each <= limit for _, each in figures)} of {len(figures)} within"
    figure = f"{100 * worst:.2f} %" if percent else f"{worst:.3f}"
    return Target(what, reach, figure, where, worst <= limit)


# --- where the lines come from ----------------------------------------------------------------


def about(records: Sequence[Record], text: str | None = None) -> list[str]:
    """The sections that name commands, commits and machines of lines, and how they were measured.

    One sentence if all lines have the same, otherwise a table with a row for each combination.

    Args:
        records: lines with the head of `machine_record`.
        text: a module's docstring, whose paragraphs after the commands say how.
    """
    paragraphs = [" ".join(each.split()) for each in (text or "").split("\n\n")[2:]]
    method = ["", "## How it was measured", "", *paragraphs[:1]] if paragraphs else []
    groups: dict[tuple[str, ...], list[Record]] = {}
    for each in records:
        key = (f"`{each['command']}`", each["commit"], hardware_text(each), versions_text(each))
        groups.setdefault(key, []).append(each)
    title = ["## Command, commit, machine", ""]
    if len(groups) == 1:
        return [*title, machine_text(records[0], _loads(records)), *method]
    distinct = [list(dict.fromkeys(each)) for each in zip(*groups, strict=True)]
    columns = ["command", "commit", "models", "load average at the start", "machine"]
    columns += ["versions"] * (len(distinct[3]) > 1)
    rows = []
    for (command, commit, *machine), own in groups.items():
        models = ", ".join(dict.fromkeys(each.get("model", "") for each in own))
        rows.append([command, commit, models, _loads(own), *machine][: len(columns)])
    counts = [
        f"{len(each)} {noun}{'s' * (len(each) > 1)}"
        for each, noun in zip(distinct, ("command", "commit", "machine"), strict=False)
    ]
    come = f"The lines come from {counts[0]} at {counts[1]} on {counts[2]}."
    versions = f" {distinct[3][0]}." if len(distinct[3]) == 1 else ""
    return [*title, come + versions, "", *table(columns, rows), *method]


def _loads(records: Iterable[Record]) -> str:
    loads = [each["load_average"] for each in records]
    low, high = f"{min(loads):.1f}", f"{max(loads):.1f}"
    return low if low == high else f"{low} to {high}"


_TEMPLATES = _templates()
