"""`rockmate run`: a script, unchanged, whose models train inside a budget."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rockmate.adoption.script import after_import, hide_own_frames, run_module, run_script
from rockmate.budget import parse_budgets, parse_memory
from rockmate.cli.arguments import add_option
from rockmate.errors import InvalidArgumentError
from rockmate.planning.options import AT_HOME


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "run",
        usage="rockmate run [options] script.py|-m package.module [arguments]",
        help="run a training script, unchanged, with its models inside a budget",
        description=(
            "Run a script as Python does. The models that it trains are planned in place; what "
            "cannot be planned runs as it is, after a line that says why."
        ),
        allow_abbrev=False,
    )
    add, bound = command.add_argument, command.add_mutually_exclusive_group()
    text = "most memory of the device, as 24GiB; auto is what a GPU has (default: auto)"
    bound.add_argument("--memory", metavar="SIZE", help=text)
    text = "of activations: a fraction up to 1 of the peak without recomputation, or a size"
    bound.add_argument("--budget", metavar="B", help=text)
    for name in ("numerics", "offload", "host_budget", "weights"):
        add_option(command, name)
    add("--dry-run", action="store_true", help="end after a step, and print what budgets cost")
    add("--strict", action="store_true", help="end in errors of planning")
    text = "run so many processes, as torchrun does with -m rockmate run"
    add("--nproc-per-node", metavar="N", help=text)
    rest: dict[str, Any] = {"nargs": argparse.REMAINDER, "help": argparse.SUPPRESS}
    add("-m", dest="module", **rest)
    add("script", **rest)


def check(arguments: argparse.Namespace) -> None:
    """Reads the bound; raises a `RockmateError` for what can be told before the script runs."""
    target = arguments.module or arguments.script
    if not target:
        raise InvalidArgumentError("no script is given: rockmate run --memory 24GiB train.py")
    if not arguments.module and not Path(target[0]).is_file():
        raise InvalidArgumentError(f"there is no file {target[0]!r} to run; give a script")
    if arguments.budget is None:
        arguments.memory = arguments.memory or "auto"
    else:
        arguments.budget, *others = parse_budgets(arguments.budget)
        if others:
            raise InvalidArgumentError("--budget has several budgets, and a run has one; give one")
    if arguments.weights in AT_HOME and arguments.offload is None:
        msg = f"--weights {arguments.weights} needs a home for them: --offload host or disk:FOLDER"
        raise InvalidArgumentError(msg)
    if arguments.memory not in (None, "auto"):
        parse_memory(arguments.memory, "--memory")


def run(arguments: argparse.Namespace) -> int:
    """Runs the script; its errors and its `SystemExit` are raised."""
    if arguments.nproc_per_node and "TORCHELASTIC_RUN_ID" not in os.environ:
        ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*ranks, arguments.nproc_per_node, "-m", "rockmate", *arguments.given]
        os.execv(sys.executable, [sys.executable, "-m", *command])
    sessions, error = list[Any](), None

    def begin(_: Any) -> None:
        try:
            from rockmate.adoption.session import Session

            sessions.append(Session(arguments))
        except Exception as raised:
            if arguments.strict:
                raise
            sys.stderr.write(f"rockmate: nothing is planned, since {raised}\n")

    after_import("torch", begin)  # not at once: a script may set what PyTorch reads at its import
    try:
        (run_module if arguments.module else run_script)(arguments.module or arguments.script)
    except BaseException as raised:
        error = raised
        if not arguments.strict:
            hide_own_frames()
        raise
    finally:
        for session in sessions:
            session.end(error)
    return 0
