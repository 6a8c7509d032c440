"""What each stage of the search for one budget gains, and what it costs.

    python -m bench.search_stages                         # models of four minutes on one core
    python -m bench.search_stages --tiny --model unet     # a model for tests

Every model is planned at some shares of its baseline's peak and at its smallest peak, with op times
estimated for one machine, so the same plans come out in every run. A stage that gains nothing in
these tables is no use.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from bench import command, models
from bench.machine import machine_record, machine_text
from bench.pages import table
from rockmate._util import gc_paused
from rockmate.bound.solver_time import SolverTime
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.machine import load_machine
from rockmate.planning.search_trace import SearchTrace
from rockmate.planning.strategies import Searches
from rockmate.step import capture_step

MODELS = ("gpt2-2layer", "llama-2layer", "unet", "resnet50", "convnext", "qwen3-moe", "hrnet")
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.25)
MACHINE = "cpu-avx2"
SOLVER_LIMIT_S = 30.0
MIN_GAIN = 1e-9

PLAN_COLUMNS = ("model", "budget", "time", "gap", "s", "found by")
STAGE_COLUMNS = ("stage", "runs", "improved", "gain a plan", "s", "gain a second")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPlan:
    """One search.

    Attributes:
        model: its name in `bench.models`.
        share: budget over the baseline's peak.
        trace: what the search did.
    """

    model: str
    share: float
    trace: SearchTrace


def traced_plans(name: str, shares: Sequence[float], *, tiny: bool = False) -> list[TracedPlan]:
    """Plans a model within shares of its baseline's peak and at its smallest peak.

    Shares below the smallest peak are left out.
    """
    workload = models.build(name, tiny=tiny)
    machine = load_machine(MACHINE)
    step = capture_step(workload.model, workload.sample, machine=machine)
    costs = estimate_costs(step.graph, machine)
    form = Searches(step.graph, costs, SolverTime(SOLVER_LIMIT_S))
    search, baseline_bytes = form.local_search, form.baseline.peak_bytes
    minimum_bytes = search.minimum().peak_bytes
    budgets = [minimum_bytes, *(int(share * baseline_bytes) for share in shares)]
    found: list[TracedPlan] = []
    for budget_bytes in sorted(budgets, reverse=True):
        if budget_bytes >= minimum_bytes:
            with gc_paused():
                search.best_within(budget_bytes)
            trace = search.traces[budget_bytes]
            share = budget_bytes / baseline_bytes
            found.append(TracedPlan(model=name, share=share, trace=trace))
    return found


def plan_rows(plans: Iterable[TracedPlan]) -> list[tuple[str, ...]]:
    """A row for each plan: its time and gap, what it took, the stage that found it."""
    rows = []
    for plan in plans:
        steps = plan.trace.steps
        last = steps[-1]
        source = next(step.source for step in steps if step.time_ms == last.time_ms)
        rows.append(
            (
                plan.model,
                f"{plan.share:.3f}",
                f"{last.time_ms / plan.trace.baseline_ms:.4f}",
                f"{last.gap:.2%}",
                f"{last.elapsed_s:.2f}",
                source,
            )
        )
    return rows


def stage_rows(plans: Sequence[TracedPlan]) -> list[tuple[str, ...]]:
    """A row for each stage, the one of the largest gain first.

    The first stage has no plan to improve: its gain is that over nothing, and not counted.
    """
    runs: dict[str, list[tuple[float, float]]] = {}
    for plan in plans:
        for step in plan.trace.steps:
            runs.setdefault(step.source, []).append((step.gain or 0.0, step.seconds))
    rows = []
    for source, each in sorted(runs.items(), key=lambda item: -sum(gain for gain, _ in item[1])):
        gain = sum(gain for gain, _ in each)
        seconds = sum(seconds for _, seconds in each)
        rows.append(
            (
                source,
                str(len(each)),
                str(sum(gain > MIN_GAIN for gain, _ in each)),
                f"{gain / len(plans):.3%}",
                f"{seconds:.2f}",
                f"{gain / seconds:.2%}" if seconds else "",
            )
        )
    return rows


def page(plans: Sequence[TracedPlan]) -> list[str]:
    """Both tables, as lines of markdown."""
    gaps = [plan.trace.steps[-1].gap for plan in plans]
    seconds = [plan.trace.steps[-1].elapsed_s for plan in plans]
    return [
        "# What the stages of a search gain",
        "",
        f"{len(plans)} plans: median gap to the quick bound {statistics.median(gaps):.2%}, "
        f"mean {statistics.mean(gaps):.2%}; {statistics.mean(seconds):.2f} s a plan. Gains are "
        "shares of the time without recomputation.",
        "",
        *table(STAGE_COLUMNS, stage_rows(plans)),
        "",
        *table(PLAN_COLUMNS, plan_rows(plans)),
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page."""
    parser = command.parser("search_stages", __doc__, models=sorted(models.REGISTRY), tiny=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plans = [
        plan
        for name in options.model or MODELS
        for plan in traced_plans(name, SHARES, tiny=options.tiny)
    ]
    lines = [*page(plans), machine_text(machine_record("bench.search_stages"))]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
