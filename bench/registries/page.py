"""The pages of `bench.zoo` and `bench.fields`: counts, then each model that is not right."""

from __future__ import annotations

from collections.abc import Sequence

from bench.command import Record
from bench.machine import machine_text
from bench.pages import filled

_FAULTS = ("WRONG", "refused", "error", "timeout")
_LONGEST = 300


def page(records: Sequence[Record], template: str = "zoo") -> list[str]:
    """The lines of the page, by one of the templates."""
    if not records:
        return ["# Registered architectures", "", "No model is finished."]
    registries: dict[str, list[Record]] = {}
    for record in records:
        registries.setdefault(record["registry"], []).append(record)
    return filled(
        template,
        verdicts=["bitwise", "within rounding", *_FAULTS],
        registries=registries,
        records=records,
        faults=[
            {**record, "reason": _reason(record)}
            for verdict in _FAULTS
            for record in records
            if record["verdict"] == verdict
        ],
        machine=machine_text(records[-1]),
    )


def _reason(record: Record) -> str:
    text = "; ".join(filter(None, (record.get("difference"), record["detail"])))
    shortened = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return shortened.replace("|", "\\|")
