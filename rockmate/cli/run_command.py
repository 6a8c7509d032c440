"""`rockmate run`: a script, unchanged, whose models train inside a budget."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rockmate.adoption.after_import import after_import
from rockmate.adoption.script import run_module, run_script
from rockmate.budget import parse_budget, parse_budgets
from rockmate.cli.arguments import add_option, positive
from rockmate.errors import InvalidArgumentError, InvalidBudgetError

if TYPE_CHECKING:
    from rockmate.adoption.session import Session

_RANKS = "--nproc-per-node"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "run",
        usage="rockmate run [options] script.py [arguments]\n"
        "       rockmate run [options] -m package.module [arguments]",
        help="run a training script, unchanged, with its models inside a budget",
        description=(
            "Run a script as Python does. The models that it trains are planned in place, at their "
            "first training calls; what cannot be planned runs as it is, after a line that says "
            "why. All lines of this command go to standard error."
        ),
        allow_abbrev=False,
    )
    bound = command.add_mutually_exclusive_group()
    bound.add_argument(
        "--memory",
        metavar="SIZE",
        help="most memory of the device, as 24GiB; auto is what a GPU has (default: auto)",
    )
    bound.add_argument(
        "--budget",
        metavar="B",
        help="of activations: a fraction up to 1 of the peak without recomputation, or a size",
    )
    for name in ("offload", "host_budget"):
        add_option(command, name)
    command.add_argument(
        "--report", type=Path, metavar="FILE", help="write a page of what budgets cost at the end"
    )
    command.add_argument(
        "--dry-run", action="store_true", help="end after a step, and print what budgets cost"
    )
    command.add_argument("--strict", action="store_true", help="end in errors of planning")
    command.add_argument(_RANKS, type=positive, metavar="N", help="run N processes, by torchrun")
    for names in (["-m"], ["script"]):
        rest: dict[str, Any] = {"dest": "module"} if names == ["-m"] else {}
        command.add_argument(*names, **rest, nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Runs the script; its errors and its `SystemExit` are raised."""
    target = arguments.module or arguments.script
    settings, lines = _settings(arguments), _Lines()
    # Not at once: a script may set what PyTorch reads when it is imported.
    after_import("torch", lambda _: lines.begin(settings))
    try:
        (run_module if arguments.module else run_script)(target[0], target[1:])
    except BaseException as error:
        lines.end(arguments.report, error)
        raise
    lines.end(arguments.report)
    return 0


def check(arguments: argparse.Namespace) -> None:
    """What can be told before the script runs; with several processes, becomes torchrun.

    Raises:
        RockmateError: the command cannot run as asked.
    """
    target = arguments.module or arguments.script
    if not target:
        raise InvalidArgumentError("no script is given: rockmate run --memory 24GiB train.py")
    if not arguments.module and not Path(target[0]).is_file():
        raise InvalidArgumentError(f"there is no file {target[0]!r} to run; give a script")
    _settings(arguments)
    if arguments.nproc_per_node is not None:
        _become_ranks(arguments.nproc_per_node, sys.argv[1:])


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of `RunSettings`, which is not loaded yet."""
    memory, budget = arguments.memory, arguments.budget
    if memory is None and budget is None:
        memory = "auto"
    if memory not in (None, "auto"):
        parse_budget(memory, 0)
    budgets = [None] if budget is None else parse_budgets(budget)
    if len(budgets) > 1:
        raise InvalidBudgetError(f"--budget {budget} is {len(budgets)} budgets; give one")
    given = {name: getattr(arguments, name) for name in ("offload", "host_budget")}
    return {
        "budget": budgets[0],
        "memory": memory,
        "options": {name: value for name, value in given.items() if value is not None},
        "is_strict": arguments.strict,
        "is_dry": arguments.dry_run,
    }


def _become_ranks(number: int, given: list[str]) -> NoReturn:
    """Becomes torchrun, whose processes run the same command without the number of them."""
    place = next(at for at, each in enumerate(given) if each.startswith(_RANKS))
    rest = given[place + (1 if "=" in given[place] else 2) :]
    torchrun = [sys.executable, "-m", "torch.distributed.run", _RANKS, str(number)]
    os.execv(sys.executable, [*torchrun, "-m", "rockmate", *given[:place], *rest])


class _Lines(logging.Filter):
    """What the first rank of the run tells on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._session: Session | None = None
        self._is_first = os.environ.get("RANK", "0") == "0"
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("rockmate: %(message)s"))
        handler.addFilter(self)
        logger = logging.getLogger("rockmate")
        logger.addHandler(handler)
        logger.propagate = False

    def begin(self, settings: dict[str, Any]) -> None:
        """Has the models adopted that are trained from here on."""
        from rockmate.adoption.session import RunSettings, Session

        self._session = Session(RunSettings(**settings))
        self._session.install()

    def filter(self, record: logging.LogRecord) -> bool:
        """Has the line of a first plan say what it is a plan of."""
        what = self._session.adopting if self._session else ""
        is_plan = record.msg.startswith("planned for this call")
        if what and is_plan and isinstance(record.args, tuple):
            record.args = (what, *record.args[1:])
        return self._is_first

    def end(self, report: Path | None, error: BaseException | None = None) -> None:
        """The summary, and the page."""
        if self._session is None or not self._is_first:
            return
        from rockmate.adoption.report import end_text

        for line in end_text(self._session, report, error):
            sys.stderr.write(f"rockmate: {line}\n")
        sys.stderr.flush()
