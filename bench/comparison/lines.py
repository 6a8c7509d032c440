"""A file of JSON lines that grows with every measurement."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Lines:
    """A file of JSON lines, of which the records of one model are in `records`."""

    def __init__(self, path: Path, model: str) -> None:
        """Reads what is there already."""
        self._path = path
        self._model = model
        self.records = [record for record in read(path) if record["model"] == model]

    def add(self, kind: str, **fields: Any) -> Record:
        """Writes one record to the end of the file at once, and returns it."""
        record = {"kind": kind, "model": self._model, **fields}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        return record

    def of(self, *kinds: str) -> list[Record]:
        """The records of these kinds, in the order of writing."""
        return [record for record in self.records if record["kind"] in kinds]


def read(path: Path) -> list[Record]:
    """The records of a file; none if there is no file.

    A last line that an interruption cut off is removed from the file.

    Raises:
        ValueError: Another line is not JSON.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                path.write_text("".join(f"{whole}\n" for whole in lines[:-1]))
                break
            msg = (
                f"{path}, line {number} is not JSON: {error}. "
                "Remove the line, or write to another file."
            )
            raise ValueError(msg) from error
    return records


def by_model(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by model, in the order of their first lines."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["model"], []).append(record)
    return found


def say(message: str) -> None:
    """Writes progress to stderr."""
    sys.stderr.write(f"bench: {message}\n")
    sys.stderr.flush()
