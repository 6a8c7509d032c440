"""How good plans are: a lower bound, a proved optimum, other strategies.

    python -m bench.plan_quality            # all; writes bench/results/plan_quality_cpu_<yyyymm>.*
    python -m bench.plan_quality --model llama --quick --output X
    python -m bench.plan_quality --page --output bench/results/plan_quality_cpu_202611

Writes STEM.jsonl, the page STEM.md, and a picture STEM/<model>.png for each model. The lines of a
model are written when it is finished. An interrupted command goes on when it is started again with
the same output. `bench.quality` says what is compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from bench import command
from bench.command import Record
from bench.machine import machine_record
from bench.quality.measurement import (
    QUICK,
    TWO_LAYER_MODELS,
    Extent,
    measure,
)
from bench.quality.page import page, save_picture

MODELS = (
    "gpt2", "gpt2-deep", "bert-base", "bert-narrow", "llama", "t5-small", "vit-base", "resnet50",
    "qwen3", "mlp", "encoder", "hf-resnet", "regnet", "convnext", "qwen3-moe", "modernbert",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes the page; 0 whether targets are hit or missed."""
    parser = command.parser(
        "plan_quality", __doc__, models=(*MODELS, *TWO_LAYER_MODELS), tiny=True,
        stem="plan_quality_cpu",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer budgets and limits")
    limit = "time limit of one solve of whole-graph Checkmate, in seconds"
    parser.add_argument("--checkmate-limit", type=float, metavar="S", help=limit)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not options.page:
        _measure_missing(options)
    records = command.read(command.lines_of(options))
    if not records:
        command.say(f"{command.lines_of(options)} has no line")
        return 1
    command.write(options, page(records))
    options.output.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(record["model"] for record in records):
        own = [record for record in records if record["model"] == name]
        if "frontiers" in own[0]:
            save_picture(own, options.output / f"{name}.png")
    return 0


def _measure_missing(options: argparse.Namespace) -> None:
    """Adds the records of the models that the lines lack, with these settings."""
    extent = replace(QUICK if options.quick else Extent(), is_tiny=options.tiny)
    if options.checkmate_limit:
        extent = replace(extent, whole_graph_limit_s=options.checkmate_limit)
    settings = {name: getattr(options, name) for name in ("tiny", "quick")}
    settings["checkmate_limit_s"] = options.checkmate_limit
    head, path = machine_record("bench.plan_quality") | settings, command.lines_of(options)
    known = command.read(path)
    finished = {r["model"] for r in known if settings.items() <= r.items()}
    names = options.model or (*MODELS, *TWO_LAYER_MODELS)
    missing = [name for name in names if name not in finished]
    records = [record for record in known if record["model"] not in missing]
    bar = tqdm(missing, unit="model")
    for name in bar:
        own = measure(
            name, extent, say=lambda what, name=name: bar.set_description(f"{name}: {what}")
        )
        records += [head | record for record in own]
        _write_lines(path, records)
        # A captured graph has many reference cycles.
        gc.collect()


def _write_lines(path: Path, records: Iterable[Record]) -> None:
    """Replaces the file at once, so that an interruption leaves whole models."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    partial.rename(path)


if __name__ == "__main__":
    sys.exit(main())
