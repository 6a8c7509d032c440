"""The strength of the quick tests: planted faults, and the tests that find them.

    python -m bench.mutations               # all; writes bench/results/mutations_<yyyymm>.*
    python -m bench.mutations --model "two draws of equal arguments are merged" --output X

For each fault of mutations.toml, the index of the repository is copied, the fault is planted, and
the quick tests run until one fails: first those beside the mutated code, then all. The page names
the failing test of each fault.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import command
from bench.command import ROOT, Record
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
MUTATIONS = {each["fault"]: Mutation(**each) for each in _TABLE["faults"]}


def planted(mutation: Mutation, text: str) -> str:
    """The mutated text of a file.

    Raises:
        ValueError: the replaced text does not occur exactly once.
    """
    if text.count(mutation.text) != 1:
        msg = f"{mutation.path} has {text.count(mutation.text)} times {mutation.text!r}, not once"
        raise ValueError(msg)
    return text.replace(mutation.text, mutation.mutated)


def measured(fault: str, _: argparse.Namespace) -> Iterator[Record]:
    """Plants a fault in a copy of the repository and runs the quick tests there."""
    mutation = MUTATIONS[fault]
    with tempfile.TemporaryDirectory() as folder:
        line = ["git", "checkout-index", "--all", "--prefix", f"{folder}/"]
        subprocess.run(line, cwd=ROOT, check=True)
        path = Path(folder) / mutation.path
        path.write_text(planted(mutation, path.read_text(encoding="utf-8")), encoding="utf-8")
        begin = time.perf_counter()
        found = _first_failure(folder, mutation.first) or _first_failure(folder, "tests")
        seconds = round(time.perf_counter() - begin, 1)
    yield {"model": fault, "path": mutation.path, "found_by": found, "seconds": seconds}


def _first_failure(copy: str, tests: str) -> str:
    """The first failing quick test; empty if all pass.

    Raises:
        RuntimeError: pytest ends for another reason than a failed test.
    """
    line = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    line += ["-n", "logical", "--dist", "worksteal", "-m", _TIERS, tests]
    environment = os.environ | {"PYTHONPATH": copy}
    finished = subprocess.run(
        line, cwd=copy, capture_output=True, check=False, text=True, env=environment
    )
    failed = _FAILED.search(finished.stdout)
    if failed:
        return failed[1]
    if finished.returncode not in (0, 5):  # 5: none of these tests is in the tiers
        msg = f"pytest ended with {finished.returncode}: {finished.stdout[-2000:]}"
        raise RuntimeError(msg)
    return ""


def page(records: Sequence[Record]) -> list[str]:
    """The counts, and the newest line of each fault."""
    return filled("mutations", results=command.newest(records, "model"))


main = command.main_of("mutations", __doc__, measured, page, models=MUTATIONS, stem="mutations")


if __name__ == "__main__":
    sys.exit(main())
