"""How good plans are, beside a lower bound and other strategies.

    python -m bench.plan_quality            # all; writes bench/results/plan_quality_cpu_<yyyymm>.*
    python -m bench.plan_quality --model llama --quick --output X
    python -m bench.plan_quality --page --output bench/results/plan_quality_cpu_202611

The lines of a model are written when it is finished. An interrupted command goes on when it is
started again with the same output.

Only predictions are compared: simulated peaks and sums of measured op times, all of one planner and
so with one set of op costs. No step is run. The lines of JSON are of three kinds:

* `model`: what was captured, smallest peak and frontier of each strategy;
* `plan`: one strategy at one budget, with peak and time of its replayed schedule;
* `chunked`: the default strategy at a budget of `SERIES`, where only the loss is returned and
  chunks are allowed.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench import command, models
from bench.command import Record
from bench.quality_page import SERIES, page
from rockmate import InfeasibleBudgetError, Plan, Planner
from rockmate.bound.lower_bound import LowerBound
from rockmate.plan.faults import fault_of
from rockmate.schedule.simulate import simulate

MODELS = (
    "gpt2", "gpt2-deep", "bert-base", "bert-narrow", "llama", "t5-small", "vit-base", "resnet50",
    "qwen3", "mlp", "encoder", "hf-resnet", "regnet", "convnext", "qwen3-moe", "modernbert",
)  # fmt: skip
DEFAULT = "rockmate"
OTHERS = ("none", "chen", "rotor")
STRATEGIES = (*OTHERS, DEFAULT)
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
MACHINE = "cpu-avx2"
PAGE_BYTES = 4096
QUICK_BUDGETS = (1.0, 0.5, 0.25)
NUM_FRONTIER_POINTS = 6
"""Points of each other strategy's frontier at whose peaks the default plans too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelPlans:
    """One model with its planner; `tiny` and `quick` as the options."""

    name: str
    planner: Planner
    tiny: bool
    quick: bool

    def model_record(self) -> Record:
        planner = self.planner
        return {
            "kind": "model",
            "model": self.name,
            "num_ops": len(planner.plan(1.0).graph.ops),
            "baseline_peak_bytes": planner.baseline_peak_bytes,
            "baseline_ms": planner.baseline_ms,
            "timings_s": dict(planner.timings),
            "minimum_peak_bytes": {each: planner.minimum_peak(each) for each in STRATEGIES},
            "proved_minimum_bytes": self._proved_minimum_bytes(),
            "frontiers": {
                strategy: [
                    (point.budget_bytes, point.predicted_ms)
                    for point in planner.frontier(strategy=strategy)
                ]
                for strategy in STRATEGIES
            },
            "loss_only_minimum_bytes": self._loss_only_minimum_bytes(),
        }

    def _loss_only_minimum_bytes(self) -> dict[str, int]:
        """Smallest peaks with only the loss returned, where blocks may run in chunks."""
        planner = self._loss_only_planner(machine=MACHINE)
        forms = planner._forms  # pyright: ignore[reportPrivateUsage]
        return {name: forms.min_peak(name).peak_bytes for name in ("rotor", DEFAULT)}

    def _loss_only_planner(self, **options: Any) -> Planner:
        workload = models.build(self.name, tiny=self.tiny).with_loss_inside()
        return Planner(workload.model, workload.sample, outputs="loss", **options)

    def chunked_series(self) -> Iterator[Record]:
        """The default strategy at the budgets of the series, with chunks.

        Only the loss is returned. Budgets are in bytes.
        """
        if self.name not in SERIES:
            return
        planner = self._loss_only_planner()
        for budget in SERIES[self.name]:
            plan = planner.plan(int(budget * self.planner.baseline_peak_bytes))
            assert not fault_of(plan.snapshot, plan.schedule)
            yield {
                "kind": "chunked",
                "model": self.name,
                "budget": budget,
                "budget_bytes": plan.budget_bytes,
                "peak_bytes": simulate(plan.graph, plan.schedule, plan.costs).peak_bytes,
                "ratio": plan.predicted_ms / planner.baseline_ms,
                "lower_bound_ratio": plan.lower_bound_ms / planner.baseline_ms,
                "chunks": str(plan.options.loss_chunks or ""),
            }

    def _proved_minimum_bytes(self) -> int:
        """The largest number of bytes that no unchunked schedule fits in.

        The bound is infinite there. The number is exact to a page.
        """
        plan = self.planner.plan(1.0, strategy="none")
        bounds = LowerBound(plan.graph, plan.costs, plan.baseline_ms)
        low, high = 0, self.planner.minimum_peak_bytes
        while high - low > PAGE_BYTES:
            middle = (low + high) // 2
            if math.isinf(bounds.bound_ms(middle)):
                low = middle
            else:
                high = middle
        return low

    def plans(self) -> Iterator[Record]:
        """Every strategy at every budget, and the default at points of other frontiers."""
        for budget in QUICK_BUDGETS if self.quick else BUDGETS:
            for strategy in STRATEGIES:
                yield self._plan(budget, strategy, purpose="budget")
        for budget in SERIES.get(self.name, {}):
            yield self._plan(budget, DEFAULT, purpose="series")
        for other in OTHERS:
            points = self.planner.frontier(strategy=other)
            for index in _spread(len(points), 1 if self.quick else NUM_FRONTIER_POINTS):
                for strategy in (other, DEFAULT):
                    yield self._plan(
                        points[index].budget_bytes, strategy, purpose=f"frontier of {other}"
                    )

    def _plan(self, budget: float | int, strategy: str, *, purpose: str) -> Record:
        baseline_peak_bytes = self.planner.baseline_peak_bytes
        record = {
            "kind": "plan",
            "model": self.name,
            "purpose": purpose,
            "strategy": strategy,
            "budget": budget if isinstance(budget, float) else budget / baseline_peak_bytes,
            "is_feasible": False,
        }
        try:
            begin = time.perf_counter()
            plan = self.planner.plan(budget, strategy=strategy)
            plan_s = time.perf_counter() - begin
        except InfeasibleBudgetError as error:
            return record | {
                "budget_bytes": error.budget_bytes,
                "minimum_bytes": error.minimum_bytes,
            }
        return record | {"is_feasible": True, "plan_s": plan_s} | self._replayed(plan)

    def _replayed(self, plan: Plan) -> Record:
        """Peak and time of the replayed schedule, apart from the plan's own figures."""
        assert not fault_of(plan.snapshot, plan.schedule)
        simulation = simulate(plan.graph, plan.schedule, plan.costs)
        return {
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": simulation.peak_bytes,
            "ms": simulation.time_ms,
            "ratio": simulation.time_ms / self.planner.baseline_ms,
            "lower_bound_ms": plan.lower_bound_ms,
            "gap": (simulation.time_ms - plan.lower_bound_ms) / self.planner.baseline_ms,
            "chunks": str(plan.options.loss_chunks or ""),
        }


def _spread(length: int, num_points: int) -> list[int]:
    """At most that many indices below `length`, evenly spread, with both ends."""
    if length <= num_points:
        return list(range(length))
    return [round(point * (length - 1) / max(1, num_points - 1)) for point in range(num_points)]


def _measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """The records of a model, all at once; none if the lines have them, with these settings."""
    settings = {"tiny": options.tiny, "quick": options.quick}
    known = command.read(command.lines_of(options))
    if any(r["model"] == name and settings.items() <= r.items() for r in known):
        return
    workload = models.build(name, tiny=options.tiny)
    planner = Planner(workload.model, workload.sample, numerics="bitwise")
    plans = _ModelPlans(name=name, planner=planner, **settings)
    found = plans.model_record(), *plans.plans(), *plans.chunked_series()
    yield from [settings | record for record in found]
    # A captured graph has many reference cycles.
    gc.collect()


main = command.main_of(
    "plan_quality", __doc__, _measured, page, models=MODELS, tiny=True, stem="plan_quality_cpu",
    further={"--quick": {"action": "store_true", "help": "fewer budgets"}},
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
