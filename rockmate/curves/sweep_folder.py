"""The folder of a sweep.

    sweep.json     the model and the settings
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
from collections.abc import Sequence
from pathlib import Path

from rockmate._util import write_whole
from rockmate.curves.errors import SweepError
from rockmate.curves.sweep import Key, Sweep
from rockmate.curves.sweep_row import SweepRow
from rockmate.extras import require

_FORMAT = {"format": "rockmate sweep", "version": 2}


class SweepFolder:
    """Reads and writes the files of one sweep.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        """Makes the folder.

        Raises:
            SweepError: it cannot be made or written to, or holds a sweep.
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
        if (path / "sweep.jsonl").exists():
            msg = f"{path} holds a sweep. Give another --out, or move that folder away."
            raise SweepError(msg)

    def write(self, sweep: Sweep, *, plans: Sequence[Key] = ()) -> None:
        """Writes settings, rows, and the plans of these and of the recommended row."""
        for key in {*plans, *(row.key for row in sweep if row.is_recommended)}:
            plan, path = sweep.plans[key], self._plan_path(key)
            if not path.exists():
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
