"""Runs scripts of other projects in eager and under `rockmate run`, and compares them.

    python -m bench.unchanged.run FOLDER --out bench/results/unchanged_scripts_202611.md

`FOLDER` has a checkout of each project (`karpathy+nanoGPT`, ...; see `SCRIPTS`). Scripts are run as
they are, with tiny data that is made in a folder of its own, and without a network. Both runs are
seen by `observer/sitecustomize.py`, which Python loads at its start: losses, final parameters,
times of steps, memory of one step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine_record, machine_text
from bench.unchanged.data import make_data
from bench.unchanged.scripts import SCRIPTS, Script

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_LIMIT_S = 900


@dataclass
class Run:
    """One run of a script."""

    code: int
    text: str
    seen: dict[str, Any]
    parameters: list[torch.Tensor]

    @property
    def step_ms(self) -> float:
        """The median of the second half of the steps."""
        times = self.seen.get("times", [])
        steps = sorted(b - a for a, b in itertools.pairwise(times))
        return 1e3 * steps[len(steps) // 2] if steps else 0.0


def run(script: Script, folder: Path, work: Path, python: str, options: list[str]) -> Run:
    """Runs a script in a fresh folder, under rockmate if there are options."""
    where = work / script.folder / ("rockmate" if options else "eager")
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    make_data(script.data, where)
    path = script.path.replace("{HERE}", str(_HERE)).replace("{FOLDER}", str(folder))
    given = [each.replace("{FOLDER}", str(folder)) for each in script.arguments]
    command = [python, *(["-m", "rockmate", "run", *options] if options else []), path, *given]
    paths = [
        str(_HERE / "observer"),
        str(_HERE / "stand_ins"),
        str(_ROOT),
        str(folder / "karpathy+minGPT"),
    ]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OBSERVED": str(where / "observed"),
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
        "ACCELERATE_USE_CPU": "true", "HF_HOME": str(where / "hf"),
        "MEASURED": str(script.measured),
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
    if eager.code != ours.code:
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


def row(script: Script, eager: Run, ours: Run) -> str:
    """One line of the table."""
    lines = [
        line.removeprefix("rockmate: ") for line in ours.text.splitlines() if "rockmate: " in line
    ]
    ends = [line for line in lines if " training calls, " in line or "as in eager" in line]
    plan = "; ".join(ends) or "**nothing adopted**"
    peaks = [each.seen.get("peak_bytes") for each in (eager, ours)]
    peak = " -> ".join("?" if each is None else f"{each / 2**20:.1f}" for each in peaks)
    ratio = ours.step_ms / eager.step_ms if eager.step_ms else 0.0
    num = len(ours.seen.get("losses", []))
    return f"| {script.name} | {num} | {difference(eager, ours)} | {peak} | {ratio:.2f} | {plan} |"


_HEAD = """# Scripts of other projects, unchanged

Each script is run twice as it is, with tiny data and without a network: in eager, and under
`rockmate run {options}`. Both runs are seen by a file that Python loads at its start
(`bench/unchanged/observer`). "own" scripts are of this repository, in the shape of the named ones.

- **result**: losses and the final parameters of all optimizers, compared.
- **peak, MiB**: of live memory in one step, from after one step of an optimizer to before the next,
  gradients at rest and the loss included, which a budget does not count.
- **time**: of a step, the median of the run, over eager's. Steps of tiny models are short.

{machine}

| script | backwards | result | peak, MiB | time | what rockmate says at the end |
|---|---|---|---|---|---|
"""


def main() -> int:
    """Runs the scripts of the folder, and writes the page of all that are in the work folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="scripts whose name contains it; none for -")
    parser.add_argument("--work", type=Path, help="keeps the runs; rows of earlier ones stay")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--options", default="--budget 0.6")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        work, folder = arguments.work or Path(made), arguments.folder.resolve()
        for script in SCRIPTS:
            if arguments.only not in script.name or (work / script.folder / "row.md").exists():
                continue
            options: list[list[str]] = [[], arguments.options.split()]
            runs = [run(script, folder, work, arguments.python, each) for each in options]
            (work / script.folder / "row.md").write_text(row(script, *runs))
            sys.stdout.write(row(script, *runs) + "\n")
            sys.stdout.flush()
        paths = [work / script.folder / "row.md" for script in SCRIPTS]
        rows = [path.read_text() for path in paths if path.exists()]
    if arguments.out is not None:
        machine = machine_text(machine_record("bench.unchanged.run"))
        machine = machine.replace(str(arguments.folder), "FOLDER").replace(str(arguments.work), "W")
        head = _HEAD.format(options=arguments.options, machine=machine)
        arguments.out.write_text(head + "\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
