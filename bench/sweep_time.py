"""How long a sweep of predicted budgets takes once the step is captured and its ops are measured.

    taskset -c 1 python -m bench.sweep_time
    taskset -c 1 python -m bench.sweep_time --model llama --budgets 20

Fifty budgets from a fifth of the peak with nothing recomputed to all of it, or from the smallest peak where that is more. All solving is
counted, that which budgets share too. Seconds are of processor time on one thread, so that others on the machine do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench import models
from bench.machine import machine_line, machine_record
from rockmate import Planner
from rockmate.candidate import evenly
from rockmate.step import capture_step
from rockmate.sweep_row import planned_row

MODELS = ("gpt2-12", "bert-narrow", "llama", "t5-small", "resnet50", "unet")
LOWEST_SHARE = 0.2

TARGET_S = 3.0

HEADER = """\
# Time of a sweep of predicted budgets

Command: `taskset -c 0 python -m bench.sweep_time`. Budgets from a fifth of the peak with nothing recomputed, or the smallest peak, to all
of it; seconds of processor time on one thread, after capture. All: solving that budgets share, before the first of them, and the budgets.
"""
COLUMNS = f"""\
| model | ops | measuring, s | before the first, s | budgets | all, s | <= {TARGET_S:g} s | slowest budget, ms | median gap |
|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTime:
    """One model's sweep.

    Attributes:
        name: of the model.
        num_ops: in its step.
        costs_s: wall time of measuring its ops, on the same thread.
        prepare_s: wall time, at least the processor's, of what is solved before a budget is asked for.
        budget_s: processor time of each budget after that, the largest budget first.
        median_gap: from the plans to the bound that rows of a sweep name, as a share of the step with nothing recomputed.
    """

    name: str
    num_ops: int
    costs_s: float
    prepare_s: float
    budget_s: tuple[float, ...]
    median_gap: float


def measure_model(name: str, num_budgets: int) -> SweepTime:
    """Sweeps one model of `bench.models`."""
    workload = models.build(name)
    step = capture_step(workload.model, workload.sample)
    num_ops = len(step.graph.ops)  # the graph is part of the capture, and made when it is first asked for
    planner = Planner.of(step)
    lowest_bytes = max(planner.minimum_peak_bytes, int(LOWEST_SHARE * planner.baseline_peak_bytes))
    budget_s, gaps = [], []
    for budget_bytes in reversed(evenly(lowest_bytes, planner.baseline_peak_bytes, num_budgets)):
        begin = time.process_time()
        row = planned_row(planner.plan(budget_bytes), minimum_bytes=planner.minimum_peak_bytes)
        budget_s.append(time.process_time() - begin)
        gaps.append((row.predicted_ratio or 0.0) - (row.lower_bound_ratio or 0.0))
    return SweepTime(
        name=name,
        num_ops=num_ops,
        costs_s=planner.timings["costs"],
        prepare_s=planner.timings["solve"],
        budget_s=tuple(budget_s),
        median_gap=statistics.median(gaps),
    )


def as_row(result: SweepTime) -> str:
    """One row of the table, Markdown."""
    all_s = result.prepare_s + sum(result.budget_s)
    return (
        f"| {result.name} | {result.num_ops} | {result.costs_s:.1f} | {result.prepare_s:.2f} | {len(result.budget_s)} | {all_s:.2f} | "
        f"{'hit' if all_s <= TARGET_S else '**miss**'} | {max(result.budget_s) * 1e3:.0f} | {result.median_gap:.2%} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a page: the machine and one row a model."""
    parser = argparse.ArgumentParser(prog="python -m bench.sweep_time", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", choices=sorted(models.REGISTRY), help="repeatable; six if left out")
    parser.add_argument("--budgets", type=int, default=50, help="how many, at least 2")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sys.stdout.write(f"{HEADER}\n{machine_line(machine_record('bench.sweep_time'))}\n\n{COLUMNS}\n")
    for name in chosen.model or MODELS:
        sys.stdout.write(as_row(measure_model(name, chosen.budgets)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
