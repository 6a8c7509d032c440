"""Every architecture of transformers' registries, tiny: three steps in a budget against eager.

    python -m bench.zoo                                   # all; goes on where it was interrupted
    python -m bench.zoo --registry causal-lm --name llama  # one model
    python -m bench.zoo --page                            # only the page of the finished models

Each model is built from its configuration in a process of its own, with a time limit; nothing is
downloaded. One model of each timm family joins them if timm is installed. Each finished model is
a line of STEM.jsonl; `--again VERDICT` runs those of a verdict once more. STEM.md has the counts,
and each model that is not right with its reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from bench import command
from bench.command import Record
from bench.forks import run_each
from bench.machine import machine_record
from bench.registries import timm_families
from bench.registries.batches import make_batch
from bench.registries.fields import WithLoss
from bench.registries.page import page
from bench.registries.tiny import REGISTRIES, builders, names_of
from bench.registries.trial import trial

_TIMM = "timm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the page; 0 whether models are right or wrong."""
    return campaign("zoo", __doc__, arguments, [*REGISTRIES, _TIMM], _names_of, _measure)


def campaign(
    name: str,
    text: str | None,
    arguments: Sequence[str] | None,
    registries: Sequence[str],
    names_of: Callable[[str], list[str]],
    measure: Callable[[tuple[str, str], str], Record],
) -> int:
    """Runs the models of registries that have no line yet, and writes the page; 0.

    Args:
        name: of the module, of its page and of the page's template.
        text: the module's docstring.
        arguments: the command line; None takes the process's own.
        registries: what `--registry` may be.
        names_of: the models of one.
        measure: tries a registry's model on a device, in a process of its own.
    """
    parser = command.parser(name, text, stem=f"{name}_cpu")  # of a GPU: --output
    add = parser.add_argument
    add("--registry", action="append", choices=registries, help="repeatable; default: all")
    add("--name", action="append", help="of a model; repeatable; default: all")
    add("--again", action="append", default=[], metavar="VERDICT", help="run these once more")
    add("--limit", type=float, default=60, metavar="S", help="seconds for one model")
    add(
        "--device", default="cpu", help="of the steps; op times on a GPU are estimated for its kind"
    )
    add("--parallel", type=int, default=2, metavar="N", help="processes at a time")
    options = parser.parse_args(arguments)
    options.registry = options.registry or registries
    lines = command.lines_of(options)
    if not options.page:
        _run(name, options, lines, names_of, measure)
    command.write(options, page(read(lines), name))
    return 0


def read(path: Path) -> list[Record]:
    """The newest line of each model."""
    return command.newest(command.read(path), "registry", "name")


def _run(
    command_name: str,
    options: argparse.Namespace,
    lines: Path,
    names_of: Callable[[str], list[str]],
    measure: Callable[[tuple[str, str], str], Record],
) -> None:
    torch.set_num_threads(1)
    finished = {
        (each["registry"], each["name"])
        for each in read(lines)
        if each["verdict"] not in options.again
    }
    models = [
        (registry, name)
        for registry in options.registry
        for name in names_of(registry)
        if (registry, name) not in finished and name in (options.name or [name])
    ]
    with multiprocessing.get_context("fork").Pool(1) as pool:  # a GPU started here cannot be forked
        head = pool.apply(machine_record, (f"bench.{command_name}",))
    device: str = options.device
    head |= {"device": device}
    found = run_each(
        models, lambda each: measure(each, device), parallel=options.parallel, limit_s=options.limit
    )
    for (registry, name), record in tqdm(found, total=len(models), unit="model"):
        command.add_line(lines, head | {"registry": registry, "name": name} | record)


def _names_of(registry: str) -> list[str]:
    if registry != _TIMM:
        return names_of(registry)
    if importlib.util.find_spec(_TIMM) is None:
        sys.stderr.write("timm is not installed; its families are left out\n")
        return []
    return timm_families.names()


def _measure(model: tuple[str, str], device: str) -> Record:
    """In the model's own process."""
    registry, name = model
    transformers_logging.set_verbosity_error()
    if registry == _TIMM:
        return trial(timm_families.builders(name), timm_families.make_batch, device)
    own = list(builders(registry, name))
    squared = [partial(_with_loss, build) for build in own]  # where a model has no loss of its own
    return trial([*own, *squared], partial(make_batch, registry), device)


def _with_loss(build: Callable[[], nn.Module]) -> nn.Module:
    return WithLoss(build())


if __name__ == "__main__":
    sys.exit(main())
