"""How good plans are, beside a lower bound and other strategies.

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
import sys
from collections.abc import Iterator
from dataclasses import replace

from bench import command
from bench.command import Record
from bench.quality.measurement import QUICK, Extent, measure
from bench.quality.page import page, save_picture
from bench.quality.records import newest_of_models

MODELS = (
    "gpt2", "gpt2-deep", "bert-base", "bert-narrow", "llama", "t5-small", "vit-base", "resnet50",
    "qwen3", "mlp", "encoder", "hf-resnet", "regnet", "convnext", "qwen3-moe", "modernbert",
)  # fmt: skip


def _measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """The records of a model, all at once; none if the lines have them, with these settings."""
    settings = {"tiny": options.tiny, "quick": options.quick}
    known = command.read(command.lines_of(options))
    if any(r["model"] == name and settings.items() <= r.items() for r in known):
        return
    extent = replace(QUICK if options.quick else Extent(), is_tiny=options.tiny)
    yield from [settings | record for record in measure(name, extent)]
    # A captured graph has many reference cycles.
    gc.collect()


def _draw(options: argparse.Namespace, records: list[Record]) -> int:
    options.output.mkdir(parents=True, exist_ok=True)
    for name, own in newest_of_models(records).items():
        if "frontiers" in own[0]:
            save_picture(own, options.output / f"{name}.png")
    return 0


main = command.main_of(
    "plan_quality", __doc__, _measured, page, models=MODELS, tiny=True, stem="plan_quality_cpu",
    further={"--quick": {"action": "store_true", "help": "fewer budgets"}}, after=_draw,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
