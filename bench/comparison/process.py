"""The command line of the processes that measure and plan one model."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from bench import measure, models
from bench.comparison.lines import Record

ROOT = Path(__file__).resolve().parents[2]
"""The folder that `python -m bench...` starts in."""


def parser(program: str) -> argparse.ArgumentParser:
    """The options of one model's processes."""
    made = argparse.ArgumentParser(prog=program)
    made.add_argument("--model", required=True, choices=sorted(models.REGISTRY))
    made.add_argument(
        "--lines", required=True, type=Path, metavar="JSONL", help="file to add lines to"
    )
    made.add_argument(
        "--plans", required=True, type=Path, metavar="DIRECTORY", help="folder of saved plans"
    )
    made.add_argument("--device", default="cpu")
    made.add_argument("--rounds", type=int, default=3, help="timed rounds, after one warm-up round")
    made.add_argument("--method", action="append", default=[], help="repeatable; default: all")
    made.add_argument("--quick", action="store_true", help="fewer settings and budgets")
    made.add_argument("--tiny", action="store_true", help="models for tests, steps of milliseconds")
    made.add_argument("--peers-only", action="store_true", help="measure no plans")
    return made


def arguments_of(options: argparse.Namespace) -> list[str]:
    """The command line of these options."""
    methods = [word for name in options.method for word in ("--method", name)]
    switches = ("quick", "tiny", "peers_only")
    return [
        *("--model", options.model),
        *("--lines", str(options.lines)),
        *("--plans", str(options.plans)),
        *("--device", options.device),
        *("--rounds", str(options.rounds)),
        *methods,
        *(f"--{name.replace('_', '-')}" for name in switches if getattr(options, name)),
    ]


def measured_options(options: argparse.Namespace) -> Record:
    """The options that decide what is measured, in the form of JSON."""
    return {
        key: value
        for key, value in vars(options).items()
        if not isinstance(value, Path) and key != "model"
    }


def start(options: argparse.Namespace) -> int:
    """Measures one model in a process of its own and returns its exit status."""
    command = [sys.executable, "-m", "bench.comparison.measurement", *arguments_of(options)]
    return subprocess.run(
        command, env=os.environ | measure.RESIDENT_ENVIRONMENT, cwd=ROOT, check=False
    ).returncode
