"""The page of `bench.zoo`: counts for each registry, then each model that is not right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.command import Record
from bench.machine import machine_text
from bench.pages import filled, records_table, table

_RIGHT = ("bitwise", "within rounding")
_FAULTS = ("WRONG", "refused", "error", "timeout")
_NOT_COUNTED = "eager-fails"
_LONGEST = 300


def page(records: Sequence[Record]) -> list[str]:
    """The lines of the page."""
    if not records:
        return ["# Registered architectures", "", "No model is finished."]
    return filled(
        "zoo",
        counts=_counts(records),
        faults=_faults(records),
        uncounted=_uncounted(records),
        machine=machine_text(records[-1]),
    )


def _counts(records: Sequence[Record]) -> list[str]:
    verdicts = (*_RIGHT, *_FAULTS)
    rows = []
    for registry in dict.fromkeys(each["registry"] for each in records):
        own = [each for each in records if each["registry"] == registry]
        counts = Counter(each["verdict"] for each in own)
        right = [each for each in own if each["verdict"] in _RIGHT]
        in_frames = sum(each.get("mode") == "frames" for each in right)
        numbers = [counts.total() - counts[_NOT_COUNTED], len(right), in_frames]
        numbers += [counts[verdict] for verdict in (*verdicts, _NOT_COUNTED)]
        rows.append([registry, *map(str, numbers)])
    columns = ("registry", "run in eager", "right", "of it in frames", *verdicts, "not in eager")
    return table(columns, rows)


def _faults(records: Sequence[Record]) -> list[str]:
    """Each model that eager trains and the plan does not, with its reason."""
    found = [each for verdict in _FAULTS for each in records if each["verdict"] == verdict]
    columns = (
        ("registry", "{registry}"),
        ("model", "`{name}`"),
        ("verdict", "{verdict}"),
        ("reason", lambda r: _cell("; ".join(filter(None, (r.get("difference"), r["detail"]))))),
    )
    return records_table(columns, found) if found else ["None."]


def _cell(text: str) -> str:
    shortened = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return shortened.replace("|", "\\|")


def _uncounted(records: Sequence[Record]) -> list[str]:
    """The names that eager does not train, in one line for each registry."""
    lines = []
    for registry in dict.fromkeys(each["registry"] for each in records):
        names = [
            f"`{each['name']}`"
            for each in records
            if (each["registry"], each["verdict"]) == (registry, _NOT_COUNTED)
        ]
        if names:
            lines.append(f"- {registry}: {', '.join(names)}")
    return ["## Tiny builds that eager does not train", "", *lines] if lines else []
