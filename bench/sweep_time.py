"""Time of a sweep of predicted budgets, once the step is captured and its ops are measured.

    taskset -c 1 python -m bench.sweep_time > bench/results/sweep_time_cpu_<yyyymm>.md
    taskset -c 1 python -m bench.sweep_time --model llama --budgets 20

Budgets range from a fifth of the baseline's peak, or from the smallest peak if that is larger, to
all of it. Times are processor times on one thread, with the solving that budgets share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import models
from bench.machine import machine_record
from bench.pages import machine_section, table
from rockmate import Plan, Planner
from rockmate.planning.candidate import linspace_int
from rockmate.step import capture_step

MODELS = ("gpt2-12", "bert-narrow", "llama", "t5-small", "resnet50", "unet")
LOWEST_SHARE = 0.2
NUM_SWEEPS = 3

TARGET_S = 3.0

COLUMNS = ("model", "ops", "before the first, s", "budgets", "all, s", f"<= {TARGET_S:g} s", "gap")
METHOD = (
    f"Of {NUM_SWEEPS} sweeps, each with ops measured anew, the one of median time is given. All: "
    "the solving that budgets share, before the first of them, and the budgets, planned together "
    "as `rockmate sweep` does. Gap: the distance of the predicted time to the quick lower bound, "
    "over the baseline's time, as a median."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTime:
    """One model's sweep.

    Attributes:
        name: Of the model.
        num_ops: Number of ops in its step.
        prepare_s: Wall time of the solving before a budget is given; at least the processor time.
        together_s: Processor time of all budgets together, after that.
        ratios: Predicted times, the smallest budget first, over the baseline's time.
        bounds: The same, of the bound in the rows of a sweep.
    """

    name: str
    num_ops: int
    prepare_s: float
    together_s: float
    ratios: tuple[float, ...]
    bounds: tuple[float, ...]


def measure_model(name: str, num_budgets: int) -> SweepTime:
    """Sweeps one model of `bench.models` some times, each with ops measured anew.

    All figures are of the sweep of median time.
    """
    workload = models.build(name)
    step = capture_step(workload.model, workload.sample)
    # The graph belongs to the capture, and is built when it is first read.
    num_ops = len(step.graph.ops)
    sweeps = [_swept(Planner.of(step), num_budgets) for _ in range(NUM_SWEEPS)]
    planner, plans, together_s = sorted(
        sweeps, key=lambda sweep: sweep[0].timings["solve"] + sweep[2]
    )[NUM_SWEEPS // 2]
    return SweepTime(
        name=name,
        num_ops=num_ops,
        prepare_s=planner.timings["solve"],
        together_s=together_s,
        ratios=tuple(plan.predicted_ratio for plan in plans),
        bounds=tuple(plan.quick_lower_bound_ms / planner.baseline_ms for plan in plans),
    )


def _swept(planner: Planner, num_budgets: int) -> tuple[Planner, list[Plan], float]:
    """The planner, the plans of one sweep, and their time."""
    lowest_bytes = max(planner.minimum_peak_bytes, int(LOWEST_SHARE * planner.baseline_peak_bytes))
    budgets = linspace_int(lowest_bytes, planner.baseline_peak_bytes, num_budgets)
    begin = time.process_time()
    plans = list(planner.plans(budgets).values())
    return planner, plans, time.process_time() - begin


def as_row(result: SweepTime) -> list[str]:
    """One row of the table."""
    all_s = result.prepare_s + result.together_s
    gaps = [ratio - bound for ratio, bound in zip(result.ratios, result.bounds, strict=True)]
    return [
        *(result.name, str(result.num_ops), f"{result.prepare_s:.2f}", str(len(gaps))),
        *(f"{all_s:.2f}", "hit" if all_s <= TARGET_S else "**miss**"),
        f"{statistics.median(gaps):.2%}",
    ]


def page(rows: Sequence[Sequence[str]], record: Mapping[str, Any]) -> str:
    """The page, with the slowest sweep as its headline."""
    slowest = max(rows, key=lambda row: float(row[4]))
    description = " ".join((__doc__ or "").split("\n\n")[2].split())
    lines = [
        "# Time of a sweep of predicted budgets",
        "",
        f"**A sweep of {slowest[3]} budgets takes at most {slowest[4]} s of processor time "
        f"({slowest[0]}), on {len(rows)} models.**",
        "",
        *table(COLUMNS, rows),
        "",
        *machine_section(record),
        "",
        "## How it was measured",
        "",
        f"{description} {METHOD}",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweep_time", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=sorted(models.REGISTRY),
        help=f"repeatable; default: {', '.join(MODELS)}",
    )
    parser.add_argument("--budgets", type=int, default=50, help="number of budgets, at least 2")
    chosen = parser.parse_args(arguments)
    if chosen.budgets < 2:
        parser.error(f"--budgets is {chosen.budgets}; a sweep has at least 2")
    torch.set_num_threads(1)
    record = machine_record("bench.sweep_time")
    rows = [as_row(measure_model(name, chosen.budgets)) for name in chosen.model or MODELS]
    sys.stdout.write(page(rows, record))


if __name__ == "__main__":
    main()
