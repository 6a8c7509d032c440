"""The page of `bench.fit`. The target is set here, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.machine import machine_text
from bench.pages import all_row, table, targets

Record = dict[str, Any]

MOST_BELOW = 1
"""How many rows a prediction may be below the largest batch that trains; it is never above."""

_HEADING = "# The largest batch, predicted and real"


def is_held(line: Record) -> bool:
    """Whether a prediction is within its target."""
    return 0 <= line["trains"] - line["predicted"] <= MOST_BELOW


def page(lines: Sequence[Record], names: Sequence[str]) -> list[str]:
    """The target, and a row for the newest line of each model; names of all that there are."""
    newest = list({line["model"]: line for line in lines}.values())
    if not newest:
        return [_HEADING, "", "Nothing is measured."]
    rows = [
        [
            line["model"],
            f"{line['memory_mib']} MiB",
            str(line["predicted"]),
            str(line["trains"]),
            str(line["num_runs"]),
            f"{line['predicted_s']:.0f} s",
        ]
        for line in newest
    ]
    titles = ("model", "memory", "predicted", "trains", "batches tried", "prediction took")
    what = f"predicted batch at most {MOST_BELOW} below the real one, never above"
    target = all_row(what, sum(map(is_held, newest)), len(newest))
    missing = [name for name in names if name not in {line["model"] for line in newest}]
    machine = machine_text({**newest[-1], "command": "python -m bench.fit"})
    return [
        _HEADING, "", machine, "", *targets([target]), "", "## Models", "", *table(titles, rows),
        *(["", f"Not measured yet: {'; '.join(missing)}."] if missing else []),
    ]  # fmt: skip
