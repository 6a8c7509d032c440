"""How far plans of long steps are from the lower bound: models of over 2,000 ops.

    taskset -c 0 python -m bench.long_steps                        # all; minutes on one core
    python -m bench.long_steps --model qwen3-30b-a3b --share 0.5

The models lie on the meta device in bfloat16 and are planned for an H100, so that nothing is run or
timed and equal code gives equal figures. Budgets are shares of the baseline's peak; those below the
smallest peak are left out. A step is one batch of one row, or what the campaign on GPUs takes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from bench import cluster, models
from bench.machine import machine_record
from bench.models.gpu import gpu_models
from bench.pages import machine_section, table
from rockmate import Planner

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
MACHINE = "h100"
LENGTH = 8192
TARGET = 0.01
COLUMNS = ("model", "ops", "smallest peak", *(f"{share:g}" for share in SHARES), "s a plan")
META = torch.device("meta")

Step = tuple[nn.Module, Mapping[str, Any]]


class Long(NamedTuple):
    """The plans of one model.

    Attributes:
        name: of the model.
        num_ops: of its step.
        smallest_share: its smallest peak over the baseline's.
        gaps: by share: the plan's time less the lower bound, over the baseline's time.
        plan_s: processor seconds of a plan, on average.
    """

    name: str
    num_ops: int
    smallest_share: float
    gaps: dict[float, float]
    plan_s: float


def _gpt2(tiny: bool) -> Step:
    workload = models.build("gpt2-96", tiny=tiny)
    sample = {name: value.to(META) for name, value in workload.sample.items()}
    return workload.model.to(META), sample


def _llama(size: str, tiny: bool) -> Step:
    options = argparse.Namespace(
        model=size, layers=2 if tiny else None, length=16 if tiny else LENGTH, batch=1
    )
    model, sample = cluster.model_and_batch(options)
    return model.to(torch.bfloat16), sample


def _qwen3_moe(tiny: bool) -> Step:
    """Qwen3-30B-A3B."""
    import transformers

    kind = "Qwen3Moe"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=2 if tiny else 48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        max_position_embeddings=LENGTH,
        use_cache=False,
        head_dim=128,
    )
    with META:
        model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
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


def measure(name: str, shares: Sequence[float] = SHARES, *, tiny: bool = False) -> Long:
    """Plans one model within each share of its baseline's peak that is feasible."""
    model, sample = CASES[name](tiny)
    planner = Planner(model, sample, machine=MACHINE)
    peak_bytes, gaps = planner.baseline_peak_bytes, dict[float, float]()
    begin = time.process_time()
    for share in shares:
        if share * peak_bytes >= planner.minimum_peak_bytes:
            plan = planner.plan(share)
            gaps[share] = (plan.predicted_ms - plan.lower_bound_ms) / planner.baseline_ms
    passed_s = time.process_time() - begin
    num_ops = len(planner.plan(1.0).graph.ops)
    smallest_share = planner.minimum_peak_bytes / peak_bytes
    return Long(name, num_ops, smallest_share, gaps, passed_s / max(1, len(gaps)))


def rows(found: Sequence[Long]) -> Iterator[tuple[str, ...]]:
    """A row for each model: the gap at each share, "-" below the smallest peak."""
    for each in found:
        gaps = (f"{each.gaps[share]:.2%}" if share in each.gaps else "-" for share in SHARES)
        yield (
            *(each.name, f"{each.num_ops:,}", f"{each.smallest_share:.3f}"),
            *gaps,
            f"{each.plan_s:.1f}",
        )


def page(found: Sequence[Long], record: Mapping[str, Any]) -> str:
    """The page, with the number of plans within the target as its headline."""
    gaps = [gap for each in found for gap in each.gaps.values()] or [math.nan]
    num_within = sum(gap <= TARGET for gap in gaps)
    lines = [
        "# Plans of long steps",
        "",
        f"**{num_within} of {len(gaps)} plans are within {TARGET:.0%} of the lower bound**; the "
        f"median gap is {statistics.median(gaps):.2%} of a step, the largest {max(gaps):.2%}. "
        f"Models on the meta device, planned for `{MACHINE}`; gaps by shares of the baseline's "
        'peak, "-" where nothing fits.',
        "",
        *table(COLUMNS, rows(found)),
        "",
        *machine_section(record),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.long_steps", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", action="append", choices=CASES, help="repeatable; default: all")
    add("--share", action="append", type=float, choices=SHARES, help="repeatable; default: all")
    add("--tiny", action="store_true", help="few layers, for tests")
    add("--output", type=Path, metavar="FILE", help="write the page there, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = machine_record("bench.long_steps")
    found = [
        measure(name, options.share or SHARES, tiny=options.tiny)
        for name in tqdm(options.model or list(CASES), unit="model")
    ]
    text = page(found, record)
    if options.output:
        options.output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
