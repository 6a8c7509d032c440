"""A lower bound on the time of any plan that recomputes each value at most once.

    python -m bench.bound --model vit-base --budget 87030000

The whole-graph knapsack with the budget as its limit on saved bytes, as if nothing else needed memory at any time: no working set, no
gradients. A plan of one level cannot be faster; one of several levels recomputes more. Ratios are to no recomputation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from bench import models
from checkmate import solve
from rockmate import InfeasibleBudgetError, Planner
from rockmate.budget import size_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints bound and plan for each budget."""
    parser = argparse.ArgumentParser(prog="bench.bound", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, choices=sorted(models.REGISTRY))
    parser.add_argument("--budget", required=True, type=int, action="append", help="bytes; repeatable")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    workload = models.build(options.model, tiny=options.tiny)
    planner = Planner(workload.model, workload.sample)
    for budget_bytes in options.budget:
        sys.stdout.write(f"{size_text(budget_bytes)}: bound {_bound(planner, budget_bytes):.4f}x, plan {_plan(planner, budget_bytes)}\n")
    return 0


def _bound(planner: Planner, budget_bytes: int) -> float:
    search = planner._search
    whole = search.chain.span(0, len(search.chain.blocks) - 1)
    problem, _ = search.proposals.solver.knapsack(whole)
    return 1.0 + solve(problem, budget_bytes).time_ms / planner.baseline_ms


def _plan(planner: Planner, budget_bytes: int) -> str:
    try:
        return f"{planner.plan(budget_bytes).predicted_ratio:.4f}x"
    except InfeasibleBudgetError as error:
        return f"infeasible below {error.minimum_bytes} bytes"


if __name__ == "__main__":
    sys.exit(main())
