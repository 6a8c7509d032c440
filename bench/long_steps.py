"""How far plans of long steps are from the lower bound: models of over 2,000 ops.

    taskset -c 0 python -m bench.long_steps       # writes bench/results/long_steps_h100_<yyyymm>.*
    python -m bench.long_steps --model qwen3-30b-a3b --share 0.5

The models lie on the meta device in bfloat16 and are planned for an H100, so that nothing is run or
timed and equal code gives equal figures. Budgets are shares of the baseline's peak; those below the
smallest peak are left out. A step is one batch of one row, or what the campaign on GPUs takes.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from bench import cluster, command, models
from bench.command import Record
from bench.models.gpu import gpu_models
from bench.models.hf import hf, usual
from bench.pages import Column, about, records_table
from rockmate import Planner

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
MACHINE = "h100"
LENGTH = 8192
TARGET = 0.01
META = torch.device("meta")

Step = tuple[nn.Module, Mapping[str, Any]]


def _gpt2(tiny: bool) -> Step:
    workload = models.build("gpt2-96", tiny=tiny)
    sample = {name: value.to(META) for name, value in workload.sample.items()}
    return workload.model.to(META), sample


def _llama(size: str, tiny: bool) -> Step:
    return cluster.meta_llama(size, layers=2, length=16) if tiny else cluster.meta_llama(size)


def _qwen3_moe(tiny: bool) -> Step:
    """Qwen3-30B-A3B."""
    with META:
        model = hf(
            "Qwen3MoeForCausalLM", **usual(2 if tiny else 48, 2048, 32, 6144, 151936),
            moe_intermediate_size=768, num_key_value_heads=4, num_experts=128,
            num_experts_per_tok=8, max_position_embeddings=LENGTH, head_dim=128,
        )  # fmt: skip
        tokens = torch.zeros(1, 16 if tiny else LENGTH, dtype=torch.long)
    return model.to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}


def _sdxl(tiny: bool) -> Step:
    unet = gpu_models(tiny=tiny)["sdxl-unet"]
    return unet.model(META), unet.batch(META)


CASES: dict[str, Callable[[bool], Step]] = {
    "gpt2-96": _gpt2,
    "llama-3-8b": partial(_llama, "8b"),
    "llama-3-70b": partial(_llama, "70b"),
    "qwen3-30b-a3b": _qwen3_moe,
    "sdxl-unet": _sdxl,
}


def measured(name: str, shares: Sequence[float] = SHARES, *, tiny: bool = False) -> Record:
    """Plans one model within each share of its baseline's peak that is feasible.

    A gap is the plan's time less the lower bound, over the baseline's time; times are processor
    seconds.
    """
    model, sample = CASES[name](tiny)
    planner = Planner(model, sample, machine=MACHINE)
    peak_bytes, gaps = planner.baseline_peak_bytes, dict[str, float]()
    begin = time.process_time()
    for share in shares:
        if share * peak_bytes >= planner.minimum_peak_bytes:
            plan = planner.plan(share)
            gaps[f"{share:g}"] = (plan.predicted_ms - plan.lower_bound_ms) / planner.baseline_ms
    passed_s = time.process_time() - begin
    return {
        "model": name,
        "num_ops": len(planner.plan(1.0).graph.ops),
        "smallest_share": planner.minimum_peak_bytes / peak_bytes,
        "gaps": gaps,
        "plan_s": passed_s / max(1, len(gaps)),
    }


def _gap_column(share: str) -> Column:
    return share, lambda r: f"{r['gaps'][share]:.2%}" if share in r["gaps"] else "-"


COLUMNS: tuple[Column, ...] = (
    ("model", "{model}"),
    ("ops", "{num_ops:,}"),
    ("smallest peak", "{smallest_share:.3f}"),
    *(_gap_column(f"{share:g}") for share in SHARES),
    ("s a plan", "{plan_s:.1f}"),
)


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the number of plans within the target as its headline."""
    newest = command.newest(records, "model")
    gaps = [gap for each in newest for gap in each["gaps"].values()] or [math.nan]
    num_within = sum(gap <= TARGET for gap in gaps)
    return [
        "# Plans of long steps",
        "",
        f"**{num_within} of {len(gaps)} plans are within {TARGET:.0%} of the lower bound**; the "
        f"median gap is {statistics.median(gaps):.2%} of a step, the largest {max(gaps):.2%}. "
        f"Models on the meta device, planned for `{MACHINE}`; gaps by shares of the baseline's "
        'peak, "-" where nothing fits.',
        "",
        *records_table(COLUMNS, newest),
        "",
        *about(newest),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans and writes the page."""
    parser = command.parser(
        "long_steps", __doc__, models=CASES, tiny=True, stem=f"long_steps_{MACHINE}"
    )
    parser.add_argument("--share", action="append", type=float, help="repeatable; default: all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = (
        measured(name, options.share or SHARES, tiny=options.tiny)
        for name in tqdm(options.model or list(CASES), unit="model")
    )
    return command.run("long_steps", options, found, page)


if __name__ == "__main__":
    sys.exit(main())
