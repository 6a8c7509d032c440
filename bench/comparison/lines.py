"""The lines of one model in a file that grows with every measurement."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.command import Record, add_line, read


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
        add_line(self._path, record)
        self.records.append(record)
        return record

    def of(self, *kinds: str) -> list[Record]:
        """The records of these kinds, in the order of writing."""
        return [record for record in self.records if record["kind"] in kinds]


def by_model(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by model, in the order of their first lines."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["model"], []).append(record)
    return found
