"""What a planned call costs beside eager, on tiny models whose ops take little time.

    python -m bench.call_cost > bench/results/call_cost_cpu_<yyyymm>.md

A step is forward and backward with `.grad` in place. Eager, eager once more and each budget take
turns on one thread, one step each in a round. Times are processor times, since a step of a
millisecond otherwise mostly measures the other processes on the core. The page gives medians over
rounds: of a step's time, of its ratio to eager's step of the same round, and of its difference from
that. "Eager once more" shows the resolution of the meter. Nothing is recomputed at budget 1.0.
Below it, the predicted ratio gives the time of the recomputations.
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
from bench.machine import machine_record
from bench.pages import machine_section, table
from rockmate import InfeasibleBudgetError, Planner

MODELS = ("mlp", "gpt2-2layer", "llama-2layer", "bert-2layer", "encoder")
BUDGETS = (1.0, 0.5)
NUM_ROUNDS = 500
NUM_WARM_UPS = 20

REACHED_RATIO, REACHED_MS = 1.3, 0.3
"""Targets of a planned call: one of the two is to be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """A step beside eager's, in processor time.

    Attributes:
        median_ms: Its time.
        ratio: Median over rounds of its time over eager's.
        difference_ms: Median over rounds of its time less eager's.
    """

    median_ms: float
    ratio: float
    difference_ms: float

    @property
    def is_small(self) -> bool:
        """Whether it reaches the target of the ratio or of the difference."""
        return self.ratio <= REACHED_RATIO or self.difference_ms <= REACHED_MS


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page to stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.call_cost", description=(__doc__ or "").partition("\n")[0]
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
    """Times steps in turn; the first is the reference.

    `before` runs before each, outside its time. The order alternates (A B C, C B A), so that no
    step always follows the same one.
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


def _rows(name: str, budgets: Sequence[float], num_rounds: int) -> list[list[str]]:
    """The table's rows for one model; an infeasible budget has a row without times."""
    workload = models.build(name, tiny=True)
    planner = Planner(workload.model, workload.sample)
    steps = {
        "eager": _step(workload, workload.model),
        "eager once more": _step(workload, workload.model),
    }
    predicted_ratios: dict[str, float] = {}
    rows = []
    for budget in budgets:
        key = f"budget {budget}"
        try:
            steps[key] = _step(workload, planner.module(budget, trial="never"))
        except InfeasibleBudgetError as error:
            least = error.minimum_bytes / planner.baseline_peak_bytes
            rows.append([name, key, f"infeasible: smallest is {least:.2f}", *[""] * 4])
            continue
        predicted_ratios[key] = planner.plan(budget).predicted_ratio
    num_parameters = sum(parameter.requires_grad for parameter in workload.model.parameters())
    sys.stderr.write(f"bench: {name}, {num_rounds} rounds\n")
    costs = call_costs(steps, num_rounds, lambda: workload.model.zero_grad(set_to_none=False))
    for key, cost in costs.items():
        title = f"{name}, {num_parameters} parameters"
        rows.append([title, key, *_cost_cells(cost, predicted_ratios.get(key))])
    return rows


def _cost_cells(cost: CallCost, predicted_ratio: float | None) -> list[str]:
    figures = [f"{cost.median_ms:.3f}", f"{cost.ratio:.2f}", f"{cost.difference_ms:+.3f}"]
    if predicted_ratio is None:
        return [*figures, "", ""]
    return [*figures, f"{predicted_ratio:.3f}", "hit" if cost.is_small else "**miss**"]


def _step(workload: models.Workload, model: Callable[..., Any]) -> Callable[[], Tensor]:
    batch = workload.make_batch(1)

    def step() -> Tensor:
        outputs, loss = workload.loss(model, batch)
        loss.backward()
        del outputs
        return loss.detach()

    return step


def _page(record: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> str:
    judged = [row for row in rows if row[-1]]
    num_hit = sum(row[-1] == "hit" for row in judged)
    columns = (
        *("model (tiny variant)", "step", "processor ms", "ratio to eager"),
        *("difference, ms", "predicted ratio", "target"),
    )
    lines = [
        "# Fixed cost of a planned call",
        "",
        f"**{num_hit} of {len(judged)} planned steps of tiny models take at most {REACHED_RATIO} "
        f"times eager's processor time or {REACHED_MS} ms more.**",
        "",
        *table(columns, rows),
        "",
        *machine_section(record),
        "",
        "## How it was measured",
        "",
        " ".join((__doc__ or "").split("\n\n")[2].split()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
