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

import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn
from transformers.utils import logging as transformers_logging

from bench import command, forks
from bench.command import Record
from bench.machine import machine_record, machine_text
from bench.pages import filled
from bench.registries import timm_families
from bench.registries.batches import make_batch
from bench.registries.fields import WithLoss
from bench.registries.tiny import REGISTRIES, builders, names_of
from bench.registries.trial import trial

_TIMM = "timm"

_FAULTS = ("WRONG", "refused", "error", "timeout")
_LONGEST = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the page; 0 whether models are right or wrong."""
    return campaign("zoo", __doc__, arguments, [*REGISTRIES, _TIMM], _names_of, _measure)


def campaign(
    name: str,
    text: str | None,
    arguments: Sequence[str] | None,
    registries: Sequence[str],
    names_of: Callable[[str], list[str]],
    measure: Callable[..., Record],
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
    parser = forks.parser(name, text, 60)
    add = parser.add_argument
    add("--registry", action="append", choices=registries, help="repeatable; default: all")
    add("--name", action="append", help="of a model; repeatable; default: all")
    device = "of the steps; op times on a GPU are estimated for its kind"
    add("--device", default="cpu", help=device)
    options = parser.parse_args(arguments)
    lines = command.lines_of(options)
    if not options.page:
        models = [
            {"registry": registry, "name": model}
            for registry in options.registry or registries
            for model in names_of(registry)
            if model in (options.name or [model])
        ]
        with multiprocessing.get_context("fork").Pool(1) as pool:  # a GPU in use cannot be forked
            head = pool.apply(machine_record, (f"bench.{name}",)) | {"device": options.device}
        one: Callable[[Record], Record] = lambda each: measure(**each, device=options.device)  # noqa: E731
        for record in forks.run_missing(options, ("registry", "name"), models, one):
            command.add_line(lines, head | record)
    command.write(options, page(command.read(lines), name))
    return 0


def page(records: Sequence[Record], template: str = "zoo") -> list[str]:
    """Counts, then each model that is not right, by one of the templates."""
    records = command.newest(records, "registry", "name")
    if not records:
        return ["# Registered architectures", "", "No model is finished."]
    registries: dict[str, list[Record]] = {}
    for record in records:
        registries.setdefault(record["registry"], []).append(record)
    return filled(
        template,
        verdicts=["bitwise", "within rounding", *_FAULTS],
        registries=registries,
        records=records,
        faults=[
            {**record, "reason": _reason(record)}
            for verdict in _FAULTS
            for record in records
            if record["verdict"] == verdict
        ],
        machine=machine_text(records[-1]),
    )


def _reason(record: Record) -> str:
    text = "; ".join(filter(None, (record.get("difference"), record["detail"])))
    shortened = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return shortened.replace("|", "\\|")


def _names_of(registry: str) -> list[str]:
    if registry != _TIMM:
        return names_of(registry)
    if importlib.util.find_spec(_TIMM) is None:
        sys.stderr.write("timm is not installed; its families are left out\n")
        return []
    return timm_families.names()


def _measure(registry: str, name: str, device: str) -> Record:
    """In the model's own process."""
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
