"""The folder of a sweep.

Its rows as JSON lines and CSV, the plans of measured budgets, and what they hold for.

    sweep.json     the model and the settings, by which a second run knows whether the rows are its
    own sweep.jsonl    a row a line (see `SweepRow`) sweep.csv      the same sweep.html     the
    report plans/         of each measured or recommended budget: `RockmateModule(model, sample,
    plan=Plan.load(...))` trains with it

Files are replaced whole, so that whatever stops a run leaves the rows of the last write.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rockmate.errors import PlanFileError, RockmateError
from rockmate.plan.plan import Plan
from rockmate.sweeps.row import ROW_NAMES, SweepRow

Key = tuple[str, int]
_FORMAT, _VERSION = "rockmate sweep", 1
_NOT_COMPARED = ("format", "version", "title", "budgets_bytes")


class SweepFolderError(RockmateError, ValueError):
    """A folder that a sweep cannot use.

    Not writable, of another model or other settings, or damaged.
    """


class SweepFolder:
    """Reads and writes the files of one sweep.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        """Makes the folder.

        Raises:
            SweepFolderError: it cannot be made or written to.
        """
        self.path = path
        try:
            (path / "plans").mkdir(parents=True, exist_ok=True)
            probe = path / ".probe"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            msg = f"cannot write to the folder {path}: {error.strerror}. Give another --out."
            raise SweepFolderError(msg) from error

    def budgets_bytes(self) -> list[int]:
        """The budgets of the last sweep, empty if there was none."""
        return list(self._settings().get("budgets_bytes", ()))

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises `SweepFolderError` if the folder holds a sweep of another model or setting."""
        before = self._settings()
        if not before:
            return
        other = [
            name
            for name in dict.fromkeys([*before, *settings])
            if before.get(name) != settings.get(name)
        ]
        other = [name for name in other if name not in _NOT_COMPARED]
        if any(name in ("graph", "call") for name in other):
            why = f"this is another model or sample: {settings['title']}"
        elif other:
            why = (
                f"its {other[0]} was {before.get(other[0])!r} and is {settings.get(other[0])!r} now"
            )
        else:
            return
        msg = (
            f"{self.path} holds a sweep of {before.get('title')}, and {why}. Give another --out, "
            "or move that folder away."
        )
        raise SweepFolderError(msg)

    def measured(self) -> dict[Key, tuple[SweepRow, Plan]]:
        """The rows that were measured before, each with its plan.

        Those whose plan is gone are left out.
        """
        found = {}
        for row in self._rows():
            if row.is_measured:
                try:
                    found[row.key] = (row, Plan.load(self.plan_path(row.key)))
                except (PlanFileError, FileNotFoundError):
                    continue  # it is measured again
        return found

    def plan_path(self, key: Key) -> Path:
        """Where the plan of a row is."""
        return self.path / "plans" / f"{key[0]}-{key[1]}.json"

    def write(self, rows: Sequence[SweepRow], settings: Mapping[str, Any]) -> None:
        """Writes settings and rows, in place of what was there."""
        head = {"format": _FORMAT, "version": _VERSION, **settings}
        self._replace("sweep.json", json.dumps(head, indent=1) + "\n")
        self._replace("sweep.jsonl", "".join(json.dumps(row.as_dict()) + "\n" for row in rows))
        self._replace("sweep.csv", _csv(rows))

    def write_plans(self, plans: Mapping[Key, Plan]) -> None:
        """Writes plans that are not there yet."""
        for key, plan in plans.items():
            path = self.plan_path(key)
            if plan.captured is not None or not path.exists():
                self._replace(str(path.relative_to(self.path)), plan.to_text())

    def write_report(self, html: str) -> Path:
        """Writes the report and gives its path."""
        return self._replace("sweep.html", html)

    def _replace(self, name: str, text: str) -> Path:
        path = self.path / name
        whole = path.with_name(f"{path.name}.new")
        try:
            whole.write_text(text, encoding="utf-8")
            os.replace(whole, path)
        except OSError as error:
            msg = f"cannot write {path}: {error.strerror}. What was written before is kept."
            raise SweepFolderError(msg) from error
        return path

    def _settings(self) -> dict[str, Any]:
        path = self.path / "sweep.json"
        if not path.exists():
            return {}
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise self._damaged(path, error) from error
        if (
            not isinstance(settings, dict)
            or settings.get("format") != _FORMAT
            or settings.get("version") != _VERSION
        ):
            msg = (
                f"{path} is of no sweep of this release of rockmate. Give another --out, or move "
                "that file away."
            )
            raise SweepFolderError(msg)
        return settings

    def _rows(self) -> Iterable[SweepRow]:
        path = self.path / "sweep.jsonl"
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield SweepRow(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise self._damaged(path, error) from error

    def _damaged(self, path: Path, error: Exception) -> SweepFolderError:
        return SweepFolderError(
            f"{path} is damaged ({error}). Give another --out, or move that file away."
        )


def _csv(rows: Sequence[SweepRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ROW_NAMES, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_dict() for row in rows)
    return text.getvalue()
