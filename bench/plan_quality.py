"""How good plans are: a lower bound, a proved optimum, other strategies, a plain knapsack.

    python -m bench.plan_quality            # all; writes bench/results/plan_quality_cpu_<yyyymm>.*
    python -m bench.plan_quality --model llama --quick             # one model, to the terminal
    python -m bench.plan_quality --read bench/results/plan_quality_cpu_202611.jsonl

Writes STEM.jsonl, the page STEM.md, and a picture STEM/<model>.png for each model. The lines of a
model are written when it is finished. An interrupted command goes on when it is started again with
the same output. `bench.quality` says what is compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from bench.machine import machine_record
from bench.quality import picture
from bench.quality.measurement import (
    PLANNING_MODELS,
    QUICK,
    TWO_LAYER_MODELS,
    Extent,
    measure,
)
from bench.quality.page import page
from bench.quality.records import Record

MODELS = (
    "gpt2",
    "gpt2-deep",
    "bert-base",
    "bert-narrow",
    "llama",
    "t5-small",
    "vit-base",
    "resnet50",
    "qwen3",
    "mlp",
    "encoder",
    "hf-resnet",
    "regnet",
    "convnext",
    "qwen3-moe",
    "modernbert",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page; 0 whether targets are hit or missed."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    records = _read(options.read) if options.read else _measure_all(options)
    if options.output:
        _write_page(records, options.output)
    sys.stdout.write("\n".join(page(records)) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    every = (*MODELS, *TWO_LAYER_MODELS, *PLANNING_MODELS)
    parser = argparse.ArgumentParser(
        prog="python -m bench.plan_quality", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", action="append", choices=every, help="repeatable; default: all of the page")
    add("--tiny", action="store_true", help="models for tests")
    add("--quick", action="store_true", help="fewer budgets and limits")
    limit = "time limit of one solve of whole-graph Checkmate, in seconds"
    add("--checkmate-limit", type=float, metavar="S", help=limit)
    files = "write STEM.jsonl, STEM.md and the folder STEM"
    add("--output", type=Path, metavar="STEM", help=files)
    add("--read", type=Path, metavar="JSONL", help="print the page of these lines")
    options = parser.parse_args(arguments)
    is_whole = not (options.model or options.tiny or options.quick or options.read)
    if is_whole and options.output is None:
        name = f"plan_quality_cpu_{time.strftime('%Y%m')}"
        options.output = Path(__file__).parent / "results" / name
    options.model = options.model or every
    return options


def _measure_all(options: argparse.Namespace) -> list[Record]:
    """The records of the output with those of all models that it lacks."""
    extent = replace(QUICK if options.quick else Extent(), is_tiny=options.tiny)
    if options.checkmate_limit:
        extent = replace(extent, whole_graph_limit_s=options.checkmate_limit)
    head = machine_record("bench.plan_quality") | {
        "tiny": options.tiny,
        "quick": options.quick,
        "checkmate_limit_s": options.checkmate_limit,
    }
    settings = ("tiny", "quick", "checkmate_limit_s")
    path = Path(f"{options.output}.jsonl") if options.output else None
    known = _read(path) if path and path.exists() else []
    finished = {
        record["model"]
        for record in known
        if all(name in record and record[name] == head[name] for name in settings)
    }
    missing = [name for name in options.model if name not in finished]
    records = [record for record in known if record["model"] not in missing]
    bar = tqdm(missing, unit="model")
    for name in bar:
        own = measure(
            name, extent, say=lambda what, name=name: bar.set_description(f"{name}: {what}")
        )
        records += [head | record for record in own]
        if path:
            _write_lines(path, records)
        # A captured graph has many reference cycles.
        gc.collect()
    return records


def _read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write_lines(path: Path, records: Iterable[Record]) -> None:
    """Replaces the file at once, so that an interruption leaves whole models."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    partial.rename(path)


def _write_page(records: Sequence[Record], stem: Path) -> None:
    Path(f"{stem}.md").write_text("\n".join(page(records)) + "\n")
    stem.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(record["model"] for record in records):
        own = [record for record in records if record["model"] == name]
        if "frontiers" in own[0]:
            picture.save(own, stem / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())
