"""The folder of a sweep.

    sweep.json     the model and the settings, by which a second run knows whether rows are its own
    sweep.jsonl    a row a line (see `SweepRow`)
    sweep.csv      the same
    sweep.html     the page
    plans/         of each measured and of the recommended budget: `RockmateModule(model, sample,
                   plan=Plan.load(...))` trains with it

Files are replaced whole, so that whatever stops a run leaves the rows of the last write.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rockmate._util import write_whole
from rockmate.curves.errors import SweepError
from rockmate.curves.sweep import Key, Sweep
from rockmate.curves.sweep_row import SweepRow
from rockmate.errors import PlanFileError
from rockmate.extras import require
from rockmate.plan.plan import Plan

_FORMAT = {"format": "rockmate sweep", "version": 2}
_NOT_COMPARED = (*_FORMAT, "title", "budgets_bytes")


class SweepFolder:
    """Reads and writes the files of one sweep.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        """Makes the folder.

        Raises:
            SweepError: it cannot be made or written to.
            MissingExtraError: matplotlib, which draws the page, is not installed.
        """
        require("matplotlib.figure", extra="plot", purpose="the page of a sweep")
        self.path = path
        try:
            (path / "plans").mkdir(parents=True, exist_ok=True)
            probe = path / ".probe"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            msg = f"cannot write to the folder {path}: {error.strerror}. Give another --out."
            raise SweepError(msg) from error

    def budgets_bytes(self, settings: Mapping[str, Any]) -> list[int]:
        """The budgets of the last sweep with these settings, empty if there was none.

        Raises:
            SweepError: the folder holds a sweep of another model or setting.
        """
        before = self._settings()
        names = dict.fromkeys([*before, *settings]) if before else ()
        other = [
            name
            for name in names
            if name not in _NOT_COMPARED and before.get(name) != settings.get(name)
        ]
        if not other:
            return list(before.get("budgets_bytes", ()))
        name = other[0]
        why = f"its {name} was {before.get(name)!r} and is {settings.get(name)!r} now"
        if {"graph", "call"} & set(other):
            why = f"this is another model or sample: {settings['title']}"
        raise SweepError(
            f"{self.path} holds a sweep of {before.get('title')}, and {why}. Give another --out, "
            "or move that folder away."
        )

    def measured(self) -> Iterator[tuple[SweepRow, Plan]]:
        """The rows that were measured before, each with its plan.

        Those whose plan is gone are left out: they are measured again.
        """
        path = self.path / "sweep.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            try:
                row = SweepRow(**json.loads(line))
                if row.is_measured:
                    yield row, Plan.load(self._plan_path(row.key))
            except (PlanFileError, FileNotFoundError):
                continue
            except (ValueError, TypeError) as error:
                raise _damaged(path, error) from error

    def write(self, sweep: Sweep, *, plans: Sequence[Key] = ()) -> None:
        """Writes settings, rows, and the plans of these and of the recommended row."""
        for key in {*plans, *(row.key for row in sweep if row.is_recommended)}:
            plan, path = sweep.plans[key], self._plan_path(key)
            if plan.captured is not None or not path.exists():
                self._replace(path.relative_to(self.path), plan.to_text())
        rows = [row.as_dict() for row in sweep]
        text = io.StringIO()
        writer = csv.DictWriter(text, SweepRow.names(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self._replace(Path("sweep.json"), json.dumps(_FORMAT | sweep.settings, indent=1) + "\n")
        self._replace(Path("sweep.jsonl"), "".join(json.dumps(row) + "\n" for row in rows))
        self._replace(Path("sweep.csv"), text.getvalue())

    def write_page(self, sweep: Sweep) -> None:
        """Writes the page."""
        from rockmate.curves.page import page

        self._replace(Path("sweep.html"), page(sweep))

    def _plan_path(self, key: Key) -> Path:
        return self.path / "plans" / f"{key[0]}-{key[1]}.json"

    def _replace(self, name: Path, text: str) -> None:
        path = self.path / name
        try:
            write_whole(path, text)
        except OSError as error:
            msg = f"cannot write {path}: {error.strerror}. What was written before is kept."
            raise SweepError(msg) from error

    def _settings(self) -> dict[str, Any]:
        path = self.path / "sweep.json"
        if not path.exists():
            return {}
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise _damaged(path, error) from error
        if not isinstance(settings, dict) or not settings.items() >= _FORMAT.items():
            raise SweepError(
                f"{path} is of no sweep of this release of rockmate. Give another --out, or move "
                "that file away."
            )
        return settings


def _damaged(path: Path, error: Exception) -> SweepError:
    return SweepError(f"{path} is damaged ({error}). Give another --out, or move that file away.")
