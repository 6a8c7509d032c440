"""How long a sweep of predicted budgets takes once the step is captured and its ops are measured.

    taskset -c 1 python -m bench.sweep_time
    taskset -c 1 python -m bench.sweep_time --model llama --budgets 20

Fifty budgets from a fifth of the peak with nothing recomputed to all of it, or from the smallest
peak where that is more. All solving is counted, that which budgets share too. Seconds are of
processor time on one thread, so that others on the machine do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench import models
from bench.machine import machine_record, machine_text
from rockmate import Plan, Planner
from rockmate.planning.candidate import linspace_int
from rockmate.step import capture_step

MODELS = ("gpt2-12", "bert-narrow", "llama", "t5-small", "resnet50", "unet")
LOWEST_SHARE = 0.2
LEAST_BUDGETS = 20
NUM_SWEEPS = 3

TARGET_S = 3.0

HEADER = f"""\
# Time of a sweep of predicted budgets

Command: `taskset -c 0 python -m bench.sweep_time`. Budgets from a fifth of the peak with nothing recomputed, or the smallest peak, to all
of it; seconds of processor time on one thread, after capture and measuring. All: solving that budgets share, before the first of them, and
the budgets, planned together as `rockmate sweep` does; of {NUM_SWEEPS} sweeps, each with ops measured anew, that of median time. After that
the same budgets one by one, as `Planner.plan` does, which profits from what is solved by then. Gap: from the predicted time to the bound of
one moment, as a share of the step with nothing recomputed, the median. Slower together: a plan of the sweep against that of its budget
alone, as a share of the same, mean and largest.
"""  # noqa: E501
COLUMNS = f"""\
| model | ops | before the first, s | budgets | all, s | <= {TARGET_S:g} s | gap | one by one, s | gap | slower together, mean | largest |
|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTime:
    """One model's sweep.

    Attributes:
        name: of the model.
        num_ops: in its step.
        prepare_s: wall time, at least the processor's, of what is solved before a budget is asked
            for.
        together_s: processor time of all budgets together, after that.
        alone_s: processor time of the same budgets one by one, after that.
        together: predicted times, the smallest budget first, as shares of the step with nothing
            recomputed.
        alone: likewise, of plans made one by one.
        bounds: likewise, of the bound that rows of a sweep name.
    """

    name: str
    num_ops: int
    prepare_s: float
    together_s: float
    alone_s: float
    together: tuple[float, ...]
    alone: tuple[float, ...]
    bounds: tuple[float, ...]


def measure_model(name: str, num_budgets: int) -> SweepTime:
    """Sweeps one model of `bench.models` some times, each with ops measured anew.

    All figures are of the sweep of median time.
    """
    workload = models.build(name)
    step = capture_step(workload.model, workload.sample)
    num_ops = len(
        step.graph.ops
    )  # the graph is part of the capture, and made when it is first asked for
    sweeps = [_swept(Planner.of(step), num_budgets) for _ in range(NUM_SWEEPS)]
    planner, budgets, together, together_s = sorted(
        sweeps, key=lambda sweep: sweep[0].timings["solve"] + sweep[3]
    )[NUM_SWEEPS // 2]
    alone, alone_s = _timed(
        lambda: [planner.plan(budget_bytes) for budget_bytes in reversed(budgets)][::-1]
    )
    return SweepTime(
        name=name,
        num_ops=num_ops,
        prepare_s=planner.timings["solve"],
        together_s=together_s,
        alone_s=alone_s,
        together=tuple(plan.predicted_ratio for plan in together),
        alone=tuple(plan.predicted_ratio for plan in alone),
        bounds=tuple(plan.quick_lower_bound_ms / planner.baseline_ms for plan in together),
    )


def _swept(planner: Planner, num_budgets: int) -> tuple[Planner, list[int], list[Plan], float]:
    """The planner, its budgets, the plans of one sweep, and how long these took."""
    lowest_bytes = max(planner.minimum_peak_bytes, int(LOWEST_SHARE * planner.baseline_peak_bytes))
    budgets = linspace_int(lowest_bytes, planner.baseline_peak_bytes, num_budgets)
    return planner, budgets, *_timed(lambda: list(planner.plans(budgets).values()))


def _timed(run: Callable[[], list[Plan]]) -> tuple[list[Plan], float]:
    begin = time.process_time()
    return run(), time.process_time() - begin


def as_row(result: SweepTime) -> str:
    """One row of the table, Markdown."""
    all_s = result.prepare_s + result.together_s
    slower = [
        together - alone for together, alone in zip(result.together, result.alone, strict=True)
    ]
    gaps = [
        statistics.median(ratio - bound for ratio, bound in zip(ratios, result.bounds, strict=True))
        for ratios in (result.together, result.alone)
    ]
    return (
        f"| {result.name} | {result.num_ops} | {result.prepare_s:.2f} | {len(slower)} | "
        f"{all_s:.2f} | "
        f"{'hit' if all_s <= TARGET_S else '**miss**'} | {gaps[0]:.2%} | {result.alone_s:.2f} | "
        f"{gaps[1]:.2%} | "
        f"{statistics.mean(slower):.2%} | {max(slower):.1%} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a page: the machine and one row a model."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweep_time", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=sorted(models.REGISTRY),
        help="repeatable; six if left out",
    )
    parser.add_argument(
        "--budgets", type=int, default=50, help=f"how many, at least {LEAST_BUDGETS}"
    )
    chosen = parser.parse_args(arguments)
    if chosen.budgets < LEAST_BUDGETS:
        parser.error(
            f"--budgets is {chosen.budgets}; fewer than {LEAST_BUDGETS} are not planned together"
        )
    torch.set_num_threads(1)
    sys.stdout.write(f"{HEADER}\n{machine_text(machine_record('bench.sweep_time'))}\n\n{COLUMNS}\n")
    for name in chosen.model or MODELS:
        sys.stdout.write(as_row(measure_model(name, chosen.budgets)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
