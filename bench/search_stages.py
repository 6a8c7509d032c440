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
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bench import command, models
from bench.machine import machine_record, machine_text
from bench.pages import filled
from rockmate._util import gc_paused
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.machine import load_machine
from rockmate.planning.search_problem import StoppingRule
from rockmate.planning.search_trace import SearchTrace
from rockmate.planning.strategies import Searches
from rockmate.step import capture_step

MODELS = ("gpt2-2layer", "llama-2layer", "unet", "resnet50", "convnext", "qwen3-moe", "hrnet")
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.25)
MACHINE = "cpu-avx2"
SOLVER_LIMIT_S = 30.0


class TracedPlan(NamedTuple):
    """One search: its model in `bench.models`, its budget over the baseline's peak, its trace."""

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
    form = Searches(step.graph, costs, rule=StoppingRule(time_limit_s=SOLVER_LIMIT_S))
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


class Stage(NamedTuple):
    """What a stage has gained in all plans, and in how many seconds."""

    name: str
    gains: list[float]
    seconds: float


def stages_of(plans: Sequence[TracedPlan]) -> list[Stage]:
    """The stages, the one of the largest gain first.

    The first stage has no plan to improve: its gain is that over nothing, and not counted.
    """
    runs: dict[str, list[tuple[float, float]]] = {}
    for step in (step for plan in plans for step in plan.trace.steps):
        runs.setdefault(step.source, []).append((step.gain or 0.0, step.seconds))
    stages = [
        Stage(name, [gain for gain, _ in own], sum(seconds for _, seconds in own))
        for name, own in runs.items()
    ]
    return sorted(stages, key=lambda stage: -sum(stage.gains))


def page(plans: Sequence[TracedPlan]) -> list[str]:
    """Both tables, as lines of markdown."""
    gaps = [plan.trace.steps[-1].gap for plan in plans]
    return filled(
        "search_stages",
        number=len(plans),
        median=statistics.median(gaps),
        mean=statistics.mean(gaps),
        seconds=statistics.mean(plan.trace.steps[-1].elapsed_s for plan in plans),
        stages=stages_of(plans),
        plans=plans,
        machine=machine_text(machine_record("bench.search_stages")),
    )


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
    sys.stdout.write("\n".join(page(plans)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
