"""The command `rockmate`: `demo` trains a model eager and inside a budget.

`run` trains a script's models inside a budget; `sweep` tells what each budget costs; `plan` makes
one plan; `fit` tells the largest batch; `check` tells whether this machine keeps what is promised.

Exit codes: 0 done; 1 it ran, but a promise did not hold (losses, weights, gradients, peak), or no
budget of a sweep was feasible; 2 it could not run as asked; 130 it was interrupted, and what a
sweep had measured is kept.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rockmate._torch.version import PACKAGE_VERSION, installed_version
from rockmate.budget import parse_budgets
from rockmate.cli import check_command, fit_command, run_command
from rockmate.cli.arguments import (
    add_budget_arguments,
    add_measure_arguments,
    add_model_arguments,
    add_option,
    add_run_arguments,
    at_least_two,
    fields_of,
    fraction,
    names,
    only_errors_logged,
    planning_options,
    positive,
    source_of,
    write_file,
)
from rockmate.errors import InvalidArgumentError, RockmateError
from rockmate.extras import require_all

if TYPE_CHECKING:
    from rockmate.hf.model_source import SourcedModel
    from rockmate.planning.options import PlanOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give the exit code."""
    arguments = _parser().parse_args(argv)
    arguments.given = sys.argv[1:] if argv is None else argv
    try:
        _check(arguments)
        if arguments.command != "run":
            from rockmate._util import begin_stage, stages_shown

            with stages_shown(is_shown=not arguments.quiet):
                begin_stage("loading PyTorch and the model")
                return _run(arguments)
    except RockmateError as error:
        sys.stderr.write(f"rockmate {arguments.command}: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"rockmate {arguments.command}: interrupted\n")
        return 130
    _take_interrupts()
    return run_command.run(arguments)  # its errors are the script's


def _take_interrupts() -> None:
    """Has Ctrl-C raise `KeyboardInterrupt` again, as before PyTorch was loaded."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _check(arguments: argparse.Namespace) -> None:
    """What can be told before PyTorch is loaded.

    Raises:
        InvalidBudgetError: a budget cannot be read.
        MissingExtraError: packages are missing; the text names all of them at once.
    """
    for name in ("budget", "budgets"):
        if isinstance(text := getattr(arguments, name, None), str):
            parse_budgets(text)
    given, command = vars(arguments), arguments.command
    is_demo, model = command == "demo", given.get("model") or ""
    draws = is_demo or given.get("plot") or (command == "sweep" and given["out"])
    if command == "run":
        run_command.check(arguments)
    needed = [("transformers", "hf", is_demo or (model and ":" not in model))]
    needed += [("peft", "hf", given.get("lora")), ("matplotlib", "plot", draws)]
    require_all({name: extra for name, extra, is_so in needed if is_so}, f"rockmate {command}")
    names = ["json", "plot", "write", "report", *(["out"] if command == "plan" else [])]
    for path in map(given.get, names):
        if isinstance(path, Path) and not path.absolute().parent.is_dir():
            raise InvalidArgumentError(f"there is no folder {path.parent} for {path}. Make it.")
    if "model" in given and ":" not in model:
        from rockmate.hf.source_check import check_source

        check_source(model)


def _run(arguments: argparse.Namespace) -> int:
    import torch

    _take_interrupts()
    run: Callable[[argparse.Namespace], int] = {
        "demo": _run_demo,
        "sweep": _run_sweep,
        "plan": _run_plan,
        "fit": fit_command.run,
        "check": check_command.run,
    }[arguments.command]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads or num_threads)
    try:
        with only_errors_logged("torch", "torchao"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries, to each other
            warnings.filterwarnings("ignore", "Error detected in")  # Ctrl-C in a traced backward
            return run(arguments)
    finally:
        torch.set_num_threads(num_threads)


# --- arguments ------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rockmate", description="Train a PyTorch model inside an activation budget."
    )
    version = f"rockmate {PACKAGE_VERSION}, torch {installed_version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_sweep(commands)
    _add_plan(commands)
    fit_command.add_to(commands)
    check_command.add_to(commands)
    run_command.add_to(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a language model eager and inside a budget, and compare",
        description=(
            "Train a GPT-2 twice on the sources of Python's standard library, eager and inside an "
            "activation budget, from the same weights on the same batches; print one table and "
            "plot the memory over a step. Nothing is downloaded. Of a model of yours, sweep "
            "--measure compares steps."
        ),
    )
    demo.add_argument(
        "--budget",
        type=fraction,
        default=0.4,
        help="fraction of the activation peak without recomputation (default: %(default)s)",
    )
    for name, read, default, what in (
        ("steps", positive, 6, "training steps of each run"),
        ("batch", positive, 4, "sequences in a batch"),
        ("tokens", at_least_two, 256, "tokens in a sequence"),
        ("layers", positive, 12, "of the GPT-2"),
        ("width", positive, 384, "hidden size of the GPT-2"),
    ):
        demo.add_argument(
            f"--{name}", type=read, default=default, help=f"{what} (default: {default})"
        )
    add_run_arguments(demo)
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="where the plot goes (default: %(default)s)",
    )


def _add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="what each of many budgets costs in time, from one capture of a model",
        description=(
            "Capture a model once, plan for many activation budgets, and with --measure train a "
            "few steps at each beside eager. Prints a "
            "table, and with --out writes sweep.jsonl, sweep.csv, a page sweep.html and plans to "
            "train with; the same command again "
            "skips what is measured."
        ),
    )
    add_model_arguments(sweep)
    add_budget_arguments(sweep)
    sweep.add_argument(
        "--budgets",
        metavar="B",
        help="first:last:count, as 0.2:1.0:9 or 1GiB:4GiB:7, or a list, as 2GiB,4GiB or 0.25,0.5; "
        "a number up to 1 is a fraction of the "
        "peak without recomputation (default: every tenth of that, down to the smallest peak "
        "without chunks)",
    )
    sweep.add_argument(
        "--strategies",
        type=names,
        metavar="S,S",
        help="to compare (default: rockmate; with --offload recompute too, which moves nothing, "
        "and bitwise where plans of rockmate are in chunks)",
    )
    add_measure_arguments(sweep, "at each budget, and hold them against eager")
    sweep.add_argument("--out", type=Path, metavar="DIR", help="where rows, report and plans go")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="one plan for one budget",
        description="Plan for one activation budget: print what it saves and recomputes, and "
        "write the plan to a file.",
    )
    add_model_arguments(plan)
    add_budget_arguments(plan)
    add_option(plan, "weights")
    plan.add_argument(
        "--budget",
        required=True,
        help="a fraction up to 1 of the peak without recomputation, a size as 2GiB, bytes; knee, "
        "where the curve of time against memory bends, or 1.05x, the smallest at that time",
    )
    plan.add_argument(
        "--on-infeasible",
        choices=("error", "least"),
        default="error",
        help="if no schedule fits: an error, or the smallest peak found (default: error)",
    )
    plan.add_argument("--strategy", default="rockmate", help="how to plan (default: rockmate)")
    plan.add_argument("--out", type=Path, metavar="FILE", help="where the plan goes, as JSON")
    plan.add_argument(
        "--explain",
        metavar="NAME",
        action="append",
        default=[],
        help="a value or submodule to explain; repeatable",
    )
    plan.add_argument(
        "--tree",
        action="store_true",
        help="the blocks as a tree by module path, instead of one by one",
    )


# --- demo -----------------------------------------------------------------------------------------


def _run_demo(arguments: argparse.Namespace) -> int:
    from rockmate.cli import demo, demo_report

    write_file(arguments.out, lambda path: path.mkdir(parents=True, exist_ok=True))
    result = demo.run(arguments)
    sys.stdout.write(demo_report.report(result))
    path = arguments.out / "memory.png"
    write_file(path, lambda path: demo_report.save_memory_plot(result, path))
    sys.stdout.write(f"Plot: {path}\n")
    return 0 if result.succeeded else 1


# --- sweep and plan -------------------------------------------------------------------------------


def _run_sweep(arguments: argparse.Namespace) -> int:
    from rockmate.curves.sweep_folder import SweepFolder
    from rockmate.curves.sweep_run import SweepOptions, run_sweep

    options = SweepOptions(**fields_of(SweepOptions, arguments), progress=not arguments.quiet)
    planning = planning_options(arguments)
    options.check(planning.machine)  # all that can be told before the model is built
    if arguments.out is not None:
        SweepFolder(arguments.out)
    source = _source(arguments, planning)
    try:
        found = run_sweep(
            source.model,
            source.sample_input,
            options,
            planning,
            title=source.title,
            out=arguments.out,
        )
    except KeyboardInterrupt:
        if arguments.out is not None and (arguments.out / "sweep.jsonl").exists():
            sys.stderr.write(
                f"\nWhat was found is in {arguments.out}; the same command goes on from there.\n"
            )
        raise
    sys.stdout.write(found.text(shutil.get_terminal_size().columns) + "\n")
    if arguments.out is not None:
        sys.stdout.write(f"\nPage: {arguments.out / 'sweep.html'}\n")
    return 0 if found.plans and not found.broken_promises else 1


def _run_plan(arguments: argparse.Namespace) -> int:
    from rockmate._util import end_stages, is_terminal
    from rockmate.budget import parse_budgets, slowdown_of
    from rockmate.curves.errors import SweepError
    from rockmate.curves.sweep_run import SweepOptions
    from rockmate.entry.planner import Planner

    is_choice = slowdown_of(arguments.budget) is not None
    SweepOptions([1.0] if is_choice else arguments.budget, (arguments.strategy,)).check()
    budgets = [arguments.budget] if is_choice else parse_budgets(arguments.budget)
    if len(budgets) != 1:
        raise SweepError(
            f"--budget {arguments.budget} is {len(budgets)} budgets, and a plan has one. Give one, "
            "or use `rockmate sweep`."
        )
    planning = planning_options(arguments)
    source = _source(arguments, planning)
    progress = not arguments.quiet and is_terminal()
    planner = Planner(source.model, source.sample_input, planning, progress=progress)
    plan = planner.plan(
        budgets[0], strategy=arguments.strategy, on_infeasible=arguments.on_infeasible
    )
    details = [str(plan.explain(name)) for name in arguments.explain] or [
        plan.tree() if arguments.tree else plan.block_table()
    ]
    end_stages()
    sys.stdout.write("\n\n".join([source.title, plan.summary(), *details]) + "\n")
    if arguments.out is not None:
        write_file(arguments.out, plan.save)
        sys.stdout.write(f"\nPlan: {arguments.out}\n")
    return 0


def _source(arguments: argparse.Namespace, planning: PlanOptions) -> SourcedModel:
    from rockmate.planning.simulated_capture import machine_of

    machine_of(planning)  # told now if it is not known
    return source_of(arguments)


if __name__ == "__main__":
    sys.exit(main())
