"""`rockmate fit`: the largest batch, or the longest sequence, that trains within a memory."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rockmate.cli.arguments import (
    add_measure_arguments,
    add_model_arguments,
    add_option,
    fields_of,
    names,
    planning_options,
    positive,
    source_of,
    write_file,
)
from rockmate.cli.train_script import OPTIMIZERS, command_of, script

if TYPE_CHECKING:
    from rockmate.curves.fit import Fit


def add_to(commands: Any) -> None:
    """Adds the command."""
    fit = commands.add_parser(
        "fit",
        help="the largest batch, or the longest sequence, that trains within a memory",
        description=(
            "Find the largest batch, or with --longest the longest sequence, whose training fits a "
            "device, and say for several sizes where the memory goes and how fast they train. "
            "Costs are estimated, from one capture; --measure trains a few steps on this device."
        ),
    )
    add_model_arguments(fit)
    _add_training(fit)
    _add_search(fit)
    for name in ("outputs", "offload", "host_budget", "weights"):
        add_option(fit, name)
    fit.add_argument("--json", type=Path, metavar="FILE", help="where the rows go, as JSON")
    fit.add_argument("--plot", type=Path, metavar="FILE", help="where the picture goes")
    fit.add_argument(
        "--write", type=Path, metavar="FILE", help="where a script goes that trains at the fastest"
    )


def _add_training(fit: argparse.ArgumentParser) -> None:
    fit.add_argument(
        "--memory", required=True, help="of the device, as 24GiB, 80GB or a number of bytes"
    )
    fit.add_argument(
        "--optimizer", default="adamw", help="adamw, adafactor, adamw_8bit, sgd (default: adamw)"
    )
    fit.add_argument(
        "--lora", action="store_true", help="freeze the weights and train LoRA adapters beside them"
    )
    fit.add_argument("--lora-rank", type=positive, default=16, help="of the adapters (default: 16)")
    fit.add_argument(
        "--lora-targets",
        type=names,
        default=(),
        metavar="NAME,NAME",
        help="linear layers that get an adapter (default: all but the output layer)",
    )
    fit.add_argument(
        "--frozen",
        type=names,
        default=(),
        metavar="PATH,PATH",
        help="submodules or parameters that are not trained; * stands for any text",
    )


def _add_search(fit: argparse.ArgumentParser) -> None:
    fit.add_argument(
        "--longest",
        action="store_true",
        help="the longest sequence for --batch rows, instead of the largest batch",
    )
    fit.add_argument(
        "--sizes",
        type=_sizes,
        metavar="N,N",
        help="to have rows for, beside the largest (default: chosen)",
    )
    for kind, plural in (("batch", "batches"), ("token", "tokens")):
        fit.add_argument(
            f"--{kind}-axis",
            type=_axis,
            metavar="NAME=DIM,NAME=DIM",
            help=f"the dimension of {plural} in each input that has one, where it cannot be "
            "told: by keyword, or by place",
        )
    fit.add_argument("--most", type=positive, help="the largest size to consider")
    fit.add_argument(
        "--reserve",
        help="what the device itself takes, as 700MiB or 0 (default: measured where the model is, "
        "1 GiB for a GPU that is elsewhere; and a margin for the allocator)",
    )
    add_measure_arguments(fit, "at each size of the table on this device")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and gives its exit code."""
    from rockmate._util import is_terminal
    from rockmate.curves.fit_options import FitOptions
    from rockmate.curves.fit_run import run_fit

    progress = not arguments.quiet and is_terminal()
    options = FitOptions(
        **fields_of(FitOptions, arguments),
        vary="tokens" if arguments.longest else "batch",
        planning=replace(planning_options(arguments), progress=progress),
    )
    _check(arguments, options)
    model, sample_input, title = _model(arguments)
    if arguments.write is not None:
        _check_sample(sample_input)
    found = run_fit(model, sample_input, options, title=title)
    sys.stdout.write(f"{found}\n({found.seconds_text})\n")
    _write(arguments, model, found)
    sys.stdout.write(f"next: {_next(arguments, found)}\n")
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(",") if part.strip())


def _axis(text: str) -> dict[str | int, int]:
    dims: dict[str | int, int] = {}
    for part in text.split(","):
        name, _, dim = part.strip().partition("=")
        if not name or not dim.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=DIM, as pixel_values=0")
        dims[int(name) if name.isdecimal() else name] = int(dim)
    return dims


def _check(arguments: argparse.Namespace, options: Any) -> None:
    """All that can be told before the model is built."""
    from rockmate.costs.machine import load_machine
    from rockmate.curves.errors import FitError

    _ = options.limit, options.reserve_bytes
    if arguments.machine is not None:
        load_machine(arguments.machine)
    if arguments.kernels != "eager":
        raise FitError("the kernels of a fit are PyTorch's own. Leave out --kernels.")
    if arguments.lora and arguments.frozen:
        raise FitError("--lora freezes the weights itself. Leave out --frozen, or --lora.")
    if arguments.lora_targets and not arguments.lora:
        raise FitError("--lora-targets is for --lora. Give that too, or leave it out.")
    if arguments.write and (":" in arguments.model or arguments.optimizer not in OPTIMIZERS):
        raise FitError(
            "--write writes scripts for Hugging Face configurations with an optimizer out of "
            f"{', '.join(OPTIMIZERS)}. Leave it out."
        )


def _check_sample(sample: Any) -> None:
    from rockmate.curves.errors import FitError

    shapes = {name: tuple(value.shape) for name, value in sample.items()}
    if shapes != dict.fromkeys(("input_ids", "labels"), shapes.get("input_ids")):
        msg = f"--write is for language models, and this one takes {shapes}. Leave it out."
        raise FitError(msg)


def _model(arguments: argparse.Namespace) -> tuple[Any, Any, str]:
    from rockmate.hf.adapt import freeze, with_lora

    source = source_of(arguments)
    model, what = source.model, "all parameters trained"
    if arguments.lora:
        model = with_lora(model, rank=arguments.lora_rank, targets=arguments.lora_targets)
        what = f"LoRA of rank {arguments.lora_rank}"
    elif arguments.frozen:
        num_frozen = freeze(model, arguments.frozen)
        what = f"{num_frozen / 1e6:,.1f} M parameters frozen"
    return model, source.sample_input, f"{source.title}, {what}"


def _write(arguments: argparse.Namespace, model: Any, found: Fit) -> None:
    from rockmate._util import write_whole

    def write_script(path: Path) -> None:
        write_whole(path, script(arguments, model, found))

    paths, writers = (arguments.json, arguments.plot, arguments.write), (found.save, found.plot)
    for path, write in zip(paths, (*writers, write_script), strict=True):
        if path is not None:
            write_file(path, write)
            sys.stdout.write(f"{path}\n")


def _next(arguments: argparse.Namespace, found: Fit) -> str:
    if ":" in arguments.model:
        budget_bytes = found.fastest.peak_bytes
        return f"rockmate plan {arguments.model} --budget {budget_bytes} --out plan.json"
    if arguments.write is None:
        return f"{command_of(arguments)} --write train.py"
    return f"python {arguments.write}"
