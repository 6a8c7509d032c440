"""The strength of the quick tests: planted faults, and the tests that find them.

    python -m bench.mutations --results DIR [--only N ...] > docs/internals/mutations.md

For each fault of mutations.toml, the repository is copied, the fault is planted, and the
quick tests run until one fails: first those beside the mutated code, then all. A finished fault is
a JSON file in DIR and is not run again. The page names the failing test of each fault.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench import command
from bench.command import ROOT
from bench.machine import machine_record
from bench.pages import filled

_TIERS = "unit or model"
# The sections of pytest's summary that name a failing test.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", flags=re.MULTILINE)


class Mutation(NamedTuple):
    """One planted fault, as mutations.toml says."""

    fault: str
    path: str
    text: str
    mutated: str
    first: str


_TABLE = tomllib.loads((ROOT / "bench" / "mutations.toml").read_text(encoding="utf-8"))
MUTATIONS = tuple(Mutation(**each) for each in _TABLE["faults"])


def planted(mutation: Mutation, text: str) -> str:
    """The mutated text of a file.

    Raises:
        ValueError: the replaced text does not occur exactly once.
    """
    if text.count(mutation.text) != 1:
        msg = f"{mutation.path} has {text.count(mutation.text)} times {mutation.text!r}, not once"
        raise ValueError(msg)
    return text.replace(mutation.text, mutation.mutated)


def run_mutation(mutation: Mutation) -> dict[str, Any]:
    """Plants a fault in a copy of the repository and runs the quick tests there."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        _copy_tracked(copy)
        path = copy / mutation.path
        path.write_text(planted(mutation, path.read_text(encoding="utf-8")), encoding="utf-8")
        begin = time.perf_counter()
        found = _first_failure(copy, [mutation.first]) or _first_failure(copy, ["tests"])
        seconds = time.perf_counter() - begin
    return {"fault": mutation.fault, "found_by": found, "seconds": round(seconds, 1)}


def _copy_tracked(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _first_failure(copy: Path, tests: Sequence[str]) -> str:
    """The first failing quick test; empty if all pass.

    Raises:
        RuntimeError: pytest ends for another reason than a failed test.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-n", "logical", "--dist", "worksteal", "-m", _TIERS, *tests]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    finished = subprocess.run(
        command, cwd=copy, capture_output=True, check=False, text=True, env=environment
    )
    failed = _FAILED.search(finished.stdout)
    if failed:
        return failed[1]
    if finished.returncode not in (0, 5):  # 5: none of these tests is in the tiers
        msg = f"pytest ended with {finished.returncode}: {finished.stdout[-2000:]}"
        raise RuntimeError(msg)
    return ""


def page(results: Sequence[dict[str, Any]], commit: str) -> str:
    """The results as a Markdown page."""
    paths = {mutation.fault: mutation.path for mutation in MUTATIONS}
    text = filled(
        "mutations",
        num_found=sum(bool(result["found_by"]) for result in results),
        number=len(results),
        results=results,
        paths=paths,
        commit=commit,
    )
    return "\n".join(text) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = command.parser("mutations", __doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of finished faults")
    parser.add_argument(
        "--only", type=int, nargs="+", help="numbers of faults, from 0; no page is printed"
    )
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    numbers = range(len(MUTATIONS)) if options.only is None else options.only
    files = [options.results / f"{number:02d}.json" for number in numbers]
    for number, path in zip(tqdm(numbers, desc="planted faults"), files, strict=True):
        if not path.exists():
            path.write_text(json.dumps(run_mutation(MUTATIONS[number])) + "\n", encoding="utf-8")
    if options.only is None:
        commit = machine_record("bench.mutations")["commit"]
        results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        sys.stdout.write(page(results, commit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
