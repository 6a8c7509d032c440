"""The cost of a planned call beside eager, where a tiny model leaves the time to the wrapper.

    python -m bench.call_cost [--model mlp] [--rounds 500] [--budget 1.0 --budget 0.5] >
    bench/results/call_cost_cpu_<yyyymm>.md

A step is forward and backward with `.grad` in place. Eager, eager once more and each budget take
turns on one thread, one step each a round. Time is the process's processor time: a step of a
millisecond is otherwise mostly that of whoever shares the core. Given are medians over rounds: of a
step's time, of its ratio to eager's step of the same round, and of its difference from that. What
eager once more shows is what the meter cannot tell apart. At budget 1.0 nothing is recomputed;
below, the predicted ratio says what the recomputation is expected to take.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import measure, models
from bench.machine import hardware_text, machine_record, versions_text
from rockmate import InfeasibleBudgetError, Planner

MODELS = ("mlp", "gpt2-2layer", "llama-2layer", "bert-2layer", "encoder")
BUDGETS = (1.0, 0.5)
NUM_ROUNDS = 500
NUM_WARM_UPS = 20

REACHED_RATIO, REACHED_MS = 1.3, 0.3  # a planned call is to cost no more than either


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """A step beside eager's, in processor time.

    Attributes:
        median_ms: of its time.
        ratio: median over rounds of its time over eager's.
        difference_ms: median over rounds of its time less eager's.
    """

    median_ms: float
    ratio: float
    difference_ms: float

    @property
    def is_small(self) -> bool:
        """Whether it reaches the ratio or the difference asked for."""
        return self.ratio <= REACHED_RATIO or self.difference_ms <= REACHED_MS


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page to stdout."""
    parser = argparse.ArgumentParser(
        prog="bench.call_cost", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=sorted(models.REGISTRY),
        help=f"repeatable; {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--budget", action="append", type=float, help=f"fraction of the peak, repeatable; {BUDGETS}"
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = parser.parse_args(arguments)
    record = machine_record("bench.call_cost")
    rows = [
        row
        for name in options.model or MODELS
        for row in _rows(name, options.budget or BUDGETS, options.rounds)
    ]
    sys.stdout.write(_page(record, rows))
    return 0


def call_costs(
    steps: Mapping[str, Callable[[], object]], num_rounds: int, before: Callable[[], object]
) -> dict[str, CallCost]:
    """Times steps in turn, the first being the reference.

    `before` runs ahead of each, outside its time.

    The order alternates (A B C, C B A), so that none always follows the same one.
    """
    names = list(steps)
    times_ms: dict[str, list[float]] = {name: [] for name in names}
    with measure.quiet():
        for number in range(-NUM_WARM_UPS, num_rounds):
            for name in names if number % 2 else reversed(names):
                before()
                start_ns = time.process_time_ns()
                steps[name]()
                elapsed_ms = (time.process_time_ns() - start_ns) / 1e6
                if number >= 0:
                    times_ms[name].append(elapsed_ms)
    reference = next(iter(times_ms.values()))
    return {name: _summary(own, reference) for name, own in times_ms.items()}


def _summary(own: list[float], reference: list[float]) -> CallCost:
    pairs = list(zip(own, reference, strict=True))
    return CallCost(
        median_ms=statistics.median(own),
        ratio=statistics.median(mine / theirs for mine, theirs in pairs),
        difference_ms=statistics.median(mine - theirs for mine, theirs in pairs),
    )


def _rows(name: str, budgets: Sequence[float], num_rounds: int) -> list[str]:
    """The table's rows for one model; a budget that cannot be met has one without times."""
    workload = models.build(name, tiny=True)
    planner = Planner(workload.model, workload.sample)
    steps = {
        "eager": _step(workload, workload.model),
        "eager once more": _step(workload, workload.model),
    }
    predicted_ratios, rows = {}, []
    for budget in budgets:
        key = f"budget {budget}"
        try:
            steps[key] = _step(workload, planner.module(budget))
        except InfeasibleBudgetError as error:
            rows.append(
                f"| {name} | {key} | infeasible: smallest is "
                f"{error.minimum_bytes / planner.baseline_peak_bytes:.2f} | | | | |"
            )
            continue
        predicted_ratios[key] = planner.plan(budget).predicted_ratio
    num_parameters = sum(parameter.requires_grad for parameter in workload.model.parameters())
    sys.stderr.write(f"bench: {name}, {num_rounds} rounds\n")
    costs = call_costs(steps, num_rounds, lambda: workload.model.zero_grad(set_to_none=False))
    for key, cost in costs.items():
        predicted = f"{predicted_ratios[key]:.3f}" if key in predicted_ratios else ""
        reached = ("yes" if cost.is_small else "no") if key in predicted_ratios else ""
        figures = (
            f"{cost.median_ms:.3f} | {cost.ratio:.2f} | {cost.difference_ms:+.3f} | {predicted} | "
            f"{reached}"
        )
        rows.append(f"| {name}, {num_parameters} parameters | {key} | {figures} |")
    return rows


def _step(workload: models.Workload, model: Callable[..., Any]) -> Callable[[], Tensor]:
    batch = workload.make_batch(1)

    def step() -> Tensor:
        outputs, loss = workload.loss(model, batch)
        loss.backward()
        del outputs
        return loss.detach()

    return step


def _page(record: Mapping[str, Any], rows: Sequence[str]) -> str:
    lines = [
        "# Fixed cost of a planned call",
        "",
        f"Machine: {hardware_text(record)}; load average {record['load_average']:.1f} at the "
        "start, so",
        "other processes shared the core or its caches if that is above 1. "
        f"{versions_text(record)}. Commit {record['commit']}.",
        "",
        f"Command: `{record['command']}`",
        "",
        " ".join((__doc__ or "").split("\n\n")[2].split()),
        f"Reached is a ratio of at most {REACHED_RATIO} or a difference of at most {REACHED_MS} "
        "ms.",
        "",
        "| model (tiny variant) | step | processor ms | ratio to eager | difference, ms | "
        "predicted ratio | reached |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
