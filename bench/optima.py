"""Plans of small models beside proved optima: whether the plan or the lower bound is loose.

    taskset -c 0 python -m bench.optima          # writes bench/results/optima_cpu_<yyyymm>.*
    python -m bench.optima --model unet-1 --above 1.1 --limit 60

The optimum is that of Checkmate's staged program, in which each op is in place that can be so
anywhere. No schedule with the plan's order of first runs is faster that recomputes in the backward,
and an op at most once between two first runs. Op times are estimated: nothing is run or timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench import command, models
from bench.command import Record
from bench.pages import about, filled
from rockmate import Planner
from rockmate.costs.cost import Cost
from rockmate.graph.in_place import reusable_operand
from rockmate.planning.checkmate_strategy import CheckmateSearch

TWO_LAYER_MODELS = ("gpt2-2layer", "bert-2layer", "llama-2layer")
_MAKERS = models.makers("optima")
MODELS = (*_MAKERS, *TWO_LAYER_MODELS)
ABOVE = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5)
"""Budgets, in smallest peaks."""


def net(name: str) -> models.Workload:
    """The workload of a model."""
    return models.build(name) if name in TWO_LAYER_MODELS else models.built(name, _MAKERS[name])


def measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """Plans and proves one model within each budget; times are over the baseline's."""
    own = net(name)
    planner = Planner(own.model, own.sample, machine="cpu-avx2", numerics="bitwise")
    for above in options.above or ABOVE:
        plan = planner.plan(int(above * planner.minimum_peak_bytes))
        graph, costs = plan.graph, plan.costs
        taken = [
            op.writes[0].num_bytes if reusable_operand(graph, op, op.reads) else 0
            for op in graph.ops
        ]
        order = [graph.ops[index] for index in dict.fromkeys(plan.schedule.steps)]
        in_place = replace(
            costs, first=_less(costs.first, taken), recompute=_less(costs.recompute, taken)
        )
        search = CheckmateSearch(graph, in_place, time_limit_s=options.limit, order=order)
        solution, least_ms = search.solve(plan.budget_bytes), search.problem.min_time_ms
        yield {
            "model": name,
            "num_ops": len(graph.ops),
            "above": above,
            "share": plan.budget_bytes / planner.baseline_peak_bytes,
            "plan": plan.predicted_ratio,
            "is_optimum": solution.bound_ms == solution.time_ms,
            "proved": 1 + (solution.bound_ms - least_ms) / planner.baseline_ms,
            "bound": plan.lower_bound_ms / planner.baseline_ms,
            "limit_s": options.limit,
        }


def _less(table: Sequence[Cost], taken: Sequence[int]) -> tuple[Cost, ...]:
    """Costs with so many bytes less that each op takes."""
    pairs = zip(table, taken, strict=True)
    return tuple(replace(cost, overhead_bytes=cost.overhead_bytes - size) for cost, size in pairs)


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the largest distances of plans and bounds from what is proved."""
    lines = command.newest(records, "model", "above")
    for each in lines:
        # The lower bound holds for the schedules of the program, too.
        each["proved"] = max(each["proved"], each["bound"])
        each |= {"gap": max(0.0, each["plan"] - each["proved"])}
        each |= {"loose": each["proved"] - each["bound"]}
    return filled("optima", lines=lines, about=about(lines))


_LIMIT = {"type": float, "default": 600.0, "metavar": "S", "help": "of one proof, in seconds"}
_ABOVE = {"action": "append", "type": float, "help": "smallest peaks; repeatable"}
main = command.main_of(
    "optima", __doc__, measured, page, models=MODELS, stem="optima_cpu",
    further={"--limit": _LIMIT, "--above": _ABOVE},
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
