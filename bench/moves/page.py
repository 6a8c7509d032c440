"""The page of `bench.offload`: its targets and tables are in its template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.command import Record
from bench.machine import machine_text
from bench.pages import Target, filled

_MOST_TIME = 1.25
_REACH = {"resnet50": 5, "resnet101": 6}
TIGHT = 1.2
"""The multiple of the least peak without moves at which tight plans are compared."""


def page(records: Sequence[Record]) -> list[str]:
    """The targets, and a table for each machine and for the measured models."""
    machines = [machine_text(each) for each in {r["command"]: r for r in records}.values()]
    return filled(
        "offload",
        machines="\n\n".join(machines),
        records=records,
        batch_rows=[row.text for row in _batch_rows(records)],
        tight=TIGHT,
        most_time=_MOST_TIME,
    )


def _batch_rows(records: Sequence[Record]) -> Iterator[Target]:
    """Targets that are lower limits."""
    for name, reach in _REACH.items():
        own = [r for r in records if r["kind"] == "batch" and r["model"] == name]
        times = [r["largest"] / r["rows"] for r in own]
        where = [f"on {r['machine_name']}" if r["machine_name"] else "measured here" for r in own]
        figure = ", ".join(f"{each:.3g} {at}" for at, each in zip(where, times, strict=True))
        what = f"{name}: largest batch over eager's, in its memory"
        yield Target(what, f">= {reach}", figure, "", min(times) >= reach if times else None)
