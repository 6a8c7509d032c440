"""The page of `bench.zoo`: counts for each registry, then each model that is not right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.machine import machine_text

Record = dict[str, Any]
_RIGHT = ("bitwise", "within rounding")
_FAULTS = ("WRONG", "refused", "error", "timeout")
_NOT_COUNTED = "eager-fails"
_LONGEST = 300


def page(records: Sequence[Record]) -> list[str]:
    """The lines of the page."""
    if not records:
        return ["# Registered architectures", "", "No model is finished."]
    return [
        "# Registered architectures, tiny, on a CPU",
        "",
        "Each architecture is built tiny from its configuration and trained three steps of SGD, in "
        "eager and within 0.6 of its activation peak (or the smallest peak), with "
        '`mode="auto"`, `outputs="loss"` and estimated op times: planned, or in frames where it '
        "cannot be captured. Right is: losses, gradients and buffers "
        "equal bit for bit, or within rounding: at most 1e-4 away from float64, relative to the "
        "norm. Where eager itself cannot train the tiny build, the model is not counted.",
        "",
        *_counts(records),
        "",
        *_faults(records),
        *_uncounted(records),
        machine_text(records[-1]),
    ]


def _counts(records: Sequence[Record]) -> list[str]:
    verdicts = (*_RIGHT, *_FAULTS)
    lines = [
        f"| registry | run in eager | right | of it in frames | {' | '.join(verdicts)} "
        "| not in eager |",
        "|---" * (len(verdicts) + 5) + "|",
    ]
    for registry in dict.fromkeys(each["registry"] for each in records):
        counts = Counter(each["verdict"] for each in records if each["registry"] == registry)
        cells = [
            registry,
            counts.total() - counts[_NOT_COUNTED],
            sum(counts[verdict] for verdict in _RIGHT),
            sum(
                each["registry"] == registry and each.get("mode") == "frames"
                for each in records
                if each["verdict"] in _RIGHT
            ),
            *(counts[verdict] for verdict in verdicts),
            counts[_NOT_COUNTED],
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _faults(records: Sequence[Record]) -> list[str]:
    """Each model that eager trains and the plan does not, with its reason."""
    lines = ["## Not right", "", "| registry | model | verdict | reason |", "|---|---|---|---|"]
    found = [each for verdict in _FAULTS for each in records if each["verdict"] == verdict]
    if not found:
        return ["## Not right", "", "None.", ""]
    return [*lines, *(_row(each) for each in found), ""]


def _row(record: Record) -> str:
    reason = "; ".join(filter(None, (record.get("difference"), record["detail"])))
    cells = (record["registry"], f"`{record['name']}`", record["verdict"], _cell(reason))
    return f"| {' | '.join(cells)} |"


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
    return ["## Tiny builds that eager does not train", "", *lines, ""] if lines else []
