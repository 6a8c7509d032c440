"""How far plans of long steps are from the lower bound: models of over 2,000 ops.

    taskset -c 0 python -m bench.long_steps       # writes bench/results/long_steps_h100_<yyyymm>.*
    python -m bench.long_steps --model qwen3-30b-a3b --share 0.5

The models lie on the meta device in bfloat16 and are planned for an H100, so that nothing is run or
timed and equal code gives equal figures. GPT-2 is in single precision. Budgets are shares of the
baseline's peak; those below the smallest peak are left out. A step is one batch of one row, or what
the campaign on GPUs takes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from bench import command
from bench.command import Record
from bench.models import REGISTRY, built, makers
from bench.pages import about, filled
from rockmate import Planner

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
MACHINE = "h100"
TARGET = 0.01
CASES = {
    "gpt2-96": REGISTRY["gpt2-96"],
    **makers("large"),
    "sdxl-unet": makers("gpu")["sdxl-unet"],
}


def measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """Plans one model within each share of its baseline's peak that is feasible.

    A gap is the plan's time less the lower bound, over the baseline's time; times are processor
    seconds.
    """
    dtype = torch.float32 if name in REGISTRY else torch.bfloat16
    workload = built(name, CASES[name], tiny=options.tiny, device="meta", dtype=dtype)
    planner = Planner(workload.model, workload.sample, machine=MACHINE)
    peak_bytes, gaps = planner.baseline_peak_bytes, dict[str, float]()
    begin = time.process_time()
    for share in options.share or SHARES:
        if share * peak_bytes >= planner.minimum_peak_bytes:
            plan = planner.plan(share)
            gaps[f"{share:g}"] = (plan.predicted_ms - plan.lower_bound_ms) / planner.baseline_ms
    passed_s = time.process_time() - begin
    yield {
        "model": name,
        "num_ops": len(planner.plan(1.0).graph.ops),
        "smallest_share": planner.minimum_peak_bytes / peak_bytes,
        "gaps": gaps,
        "plan_s": passed_s / max(1, len(gaps)),
    }


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the number of plans within the target as its headline."""
    newest = command.newest(records, "model")
    gaps = [gap for each in newest for gap in each["gaps"].values()] or [math.nan]
    return filled(
        "long_steps",
        num_within=sum(gap <= TARGET for gap in gaps),
        number=len(gaps),
        target=TARGET,
        median=statistics.median(gaps),
        largest=max(gaps),
        machine=MACHINE,
        shares=SHARES,
        lines=newest,
        about=about(newest),
    )


_SHARE = {"action": "append", "type": float, "help": "repeatable; default: all"}
main = command.main_of(
    "long_steps", __doc__, measured, page, models=CASES, tiny=True, stem=f"long_steps_{MACHINE}",
    further={"--share": _SHARE},
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
