"""The parts that all pages share: tables, targets, numbers, and where the lines come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import hardware_text, machine_text, versions_text

_PROVENANCE = ("## Command, commit, machine", "")


def newest_records(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The last line of a file of JSON lines for each combination of these keys; none if absent."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({tuple(each[key] for key in keys): each for each in records}.values())


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table with these columns."""
    return [table_row(columns), "|" + "---|" * len(columns), *map(table_row, rows)]


def table_row(cells: Sequence[str]) -> str:
    """One row of a table."""
    return f"| {' | '.join(cells)} |"


def megabytes(num_bytes: int | None) -> str:
    """Millions of bytes, to at least four digits; empty for None."""
    if num_bytes is None:
        return ""
    return f"{num_bytes / 1e6:.1f}" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.4g}"


# --- targets ----------------------------------------------------------------------------------


def targets(rows: Iterable[Sequence[str]]) -> list[str]:
    """The section of targets; a row is as `all_row` and `worst_row` give it."""
    return ["## Targets", "", *table(("what", "reach", "figure", "where", ""), rows)]


def all_row(what: str, num_hit: int, num_all: int) -> list[str]:
    """A target that every case has to hit."""
    verdict = "hit" if num_hit == num_all else "**miss**"
    return [what, "all", f"{num_hit} of {num_all}", "", verdict if num_all else "not measured"]


def worst_row(what: str, limit: float, figures: Sequence[tuple[str, float]]) -> list[str]:
    """A target that the largest figure has to hit; a figure stands with its place."""
    if not figures:
        return [what, f"<= {limit:.2f}", "", "", "not measured"]
    where, worst = max(figures, key=lambda pair: pair[1])
    return [what, f"<= {limit:.2f}", f"{worst:.3f}", where, "hit" if worst <= limit else "**miss**"]


# --- where the lines come from ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a command for one model.

    Attributes:
        model: Its name.
        command: As a user types it.
        machine: The record of `machine_record`.
        device: "cpu" or "cuda".
    """

    model: str
    command: str
    machine: Mapping[str, Any]
    device: str = "cpu"


def machine_section(record: Mapping[str, Any]) -> list[str]:
    """The section that names command, commit and machine of a page that one command has made."""
    return [*_PROVENANCE, machine_text(record)]


def provenance(starts: Sequence[Start]) -> list[str]:
    """The section that names command, commit and machine of all lines.

    One sentence if all lines have the same, otherwise a table with a row for each combination.
    """
    groups: dict[tuple[str, str, str, str], list[Start]] = {}
    for start in starts:
        hardware = hardware_text(start.machine, device=start.device)
        versions = versions_text(start.machine)
        key = (f"`{start.command}`", start.machine["commit"], hardware, versions)
        groups.setdefault(key, []).append(start)
    title = list(_PROVENANCE)
    if len(groups) == 1:
        ((command, commit, hardware, versions), own) = next(iter(groups.items()))
        return [
            *title,
            f"{command} at commit {commit}, load average {_loads(own)} at the start. "
            f"{hardware}. {versions}.",
        ]
    all_versions = list(dict.fromkeys(versions for _, _, _, versions in groups))
    columns = ["command", "commit", "models", "load average at the start", "machine"]
    rows = [
        [command, commit, ", ".join(dict.fromkeys(s.model for s in own)), _loads(own), hardware]
        for (command, commit, hardware, _), own in groups.items()
    ]
    if len(all_versions) > 1:
        columns.append("versions")
        rows = [[*row, key[3]] for row, key in zip(rows, groups, strict=True)]
    num_commands, num_commits, num_machines = (len({key[i] for key in groups}) for i in range(3))
    return [
        *title,
        f"The lines come from {_counted(num_commands, 'command')} at "
        f"{_counted(num_commits, 'commit')} on {_counted(num_machines, 'machine')}."
        + (f" {all_versions[0]}." if len(all_versions) == 1 else ""),
        "",
        *table(columns, rows),
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _loads(starts: Iterable[Start]) -> str:
    loads = [start.machine["load_average"] for start in starts]
    low, high = f"{min(loads):.1f}", f"{max(loads):.1f}"
    return low if low == high else f"{low} to {high}"
