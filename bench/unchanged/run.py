"""Runs scripts of other projects in eager and under `rockmate run`, and compares them.

    python -m bench.unchanged.run FOLDER --work W   # bench/results/unchanged_scripts_<yyyymm>.*
    python -m bench.unchanged.run FOLDER --work W --model "nanoGPT train.py" --output X

`FOLDER` has a checkout of each project (`karpathy+nanoGPT`, ...; see scripts.toml). Scripts run as
they are, with tiny data that is made in a folder of its own, and without a network. Both runs are
seen by `observer/sitecustomize.py`, which Python loads at its start: losses, final parameters,
times of steps, memory of one step. A script that has a line is not run again, unless it is named.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import command
from bench.command import ROOT, Record
from bench.pages import about, filled
from bench.unchanged.data import make_data
from rockmate.budget import parse_budget

_HERE = Path(__file__).parent
_LIMIT_S = 900


@dataclass(frozen=True)
class Script:
    """A row of scripts.toml, which explains its fields."""

    name: str
    path: str
    arguments: str = ""
    data: str = ""
    cwd: str = "."
    beside: str = ""
    measured: int = 4
    note: str = ""

    @property
    def folder(self) -> str:
        """Of its runs."""
        return re.sub(r"\W+", "_", self.name)


_TABLE = tomllib.loads((_HERE / "scripts.toml").read_text(encoding="utf-8"))
SCRIPTS = {name: Script(name, **fields) for name, fields in _TABLE.items()}


@dataclass
class Run:
    """One run of a script."""

    code: int
    text: str
    seen: dict[str, Any]
    parameters: list[torch.Tensor]

    @property
    def seconds(self) -> list[float]:
        """Of each step of an optimizer; of the first from the start of Python."""
        return [b - a for a, b in itertools.pairwise(self.seen.get("times", []))]

    @property
    def step_ms(self) -> float:
        """The median of the second half of the steps: planned, and most are no trials."""
        steps = self.seconds
        return 1e3 * median(steps[(len(steps) + 1) // 2 :]) if len(steps) > 1 else math.nan


def run(script: Script, folder: Path, work: Path, options: list[str]) -> Run:
    """Runs a script in a fresh folder, under rockmate if there are options."""
    where = work / script.folder / ("rockmate" if options else "eager")
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    make_data(script.data, where)
    path = str((_HERE if script.path.startswith("own/") else folder) / script.path)
    under = ["-m", "rockmate", "run", *options] if options else []
    command = [sys.executable, *under, path, *script.arguments.split()]
    paths = [_HERE / "observer", _HERE / "stand_ins", ROOT, folder / "karpathy+minGPT"]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OBSERVED": str(where / "observed"),
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
        "ACCELERATE_USE_CPU": "true", "HF_HOME": str(where / "hf"),
        "MEASURED": str(script.measured), "ROCKMATE_CACHE": str(where / "plans"),
    }  # fmt: skip
    cwd = where / script.cwd
    cwd.mkdir(parents=True, exist_ok=True)
    if script.beside:
        (cwd / script.beside).symlink_to(Path(path).parent / script.beside)
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_LIMIT_S
        )
        code, text = done.returncode, done.stderr
        (where / "stdout").write_text(done.stdout)
    except subprocess.TimeoutExpired as error:
        code, text = 124, str(error.stderr)
    (where / "stderr").write_text(text)
    seen, parameters = {}, []
    if (where / "observed.json").exists():
        seen = json.loads((where / "observed.json").read_text())
        parameters = torch.load(where / "observed.pt")
    return Run(code, text, seen, parameters)


def difference(eager: Run, ours: Run) -> str:
    """How losses and final parameters compare."""
    if eager.code or ours.code:
        return f"**exit codes {eager.code} and {ours.code}**"
    if not eager.seen or not ours.seen or len(eager.parameters) != len(ours.parameters):
        return "**nothing to compare**"
    if len(eager.seen["losses"]) != len(ours.seen["losses"]):
        return "**another number of steps**"
    pairs = list(zip(eager.parameters, ours.parameters, strict=True))
    is_equal = eager.seen["losses"] == ours.seen["losses"]
    if is_equal and all(torch.equal(a, b) for a, b in pairs):
        return "bitwise"
    worst = max(((a - b).abs().max() / a.abs().max().clamp(min=1e-8)).item() for a, b in pairs)
    return f"rounding, {worst:.0e}" if worst < 1e-3 else f"**differs, {worst:.0e}**"


def row(script: Script, eager: Run, ours: Run) -> list[str]:
    """The cells of a line of the table."""
    lines = [
        line.removeprefix("rockmate: ") for line in ours.text.splitlines() if "rockmate: " in line
    ]
    ends = [line for line in lines if " training calls, " in line or "as in eager" in line]
    least = [line.split(", ")[0] for line in lines if line.startswith("no schedule fits")]
    says = "; ".join([*least, *ends]) or "**nothing adopted**"
    gradients = ours.seen.get("gradient_bytes", 0)
    sizes = [parse_budget(each, 0) for each in re.findall(r"[;:] budget ([\d.]+ \w+)", says)]
    peaks = [each.seen.get("peak_bytes") or math.nan for each in (eager, ours)]
    return [
        script.name,
        str(len(ours.seen.get("losses", []))),
        difference(eager, ours),
        " -> ".join(f"{each / 2**20:.1f}" for each in peaks),
        f"{(sum(sizes) + gradients) / 2**20:.1f}, {gradients / 2**20:.1f} of it",
        f"{eager.step_ms:.0f} -> {ours.step_ms:.0f}, {ours.step_ms / eager.step_ms:.2f}",
        " -> ".join(f"{sum(each.seconds):.0f}" for each in (eager, ours)),
        f"{says}. {script.note}",
    ]


def measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """A script's row."""
    known = {record["model"] for record in command.read(command.lines_of(options))}
    if name in known and not options.model:
        return
    script, folder, work = SCRIPTS[name], options.folder.resolve(), options.work.resolve()
    both: list[list[str]] = [[], options.options.split()]
    cells = row(script, *(run(script, folder, work, each) for each in both))
    yield {"model": name, "options": options.options, "cells": cells}


def page(records: Sequence[Record]) -> list[str]:
    """The rows of all scripts."""
    newest = command.newest(records, "model")
    return filled("unchanged", records=newest, about=about(newest))


_FURTHER: dict[str, dict[str, Any]] = {
    "folder": {"type": Path, "nargs": "?", "default": Path(), "help": "has the checkouts"},
    "--work": {"type": Path, "default": Path("bench-out/unchanged"), "help": "keeps the runs"},
    "--options": {"default": "--budget 0.6", "help": "of `rockmate run`"},
}
main = command.main_of(
    "unchanged.run", __doc__, measured, page, models=SCRIPTS, stem="unchanged_scripts",
    further=_FURTHER,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
