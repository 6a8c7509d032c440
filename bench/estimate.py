"""The error of estimated costs, in the ratios that a plan depends on.

    taskset -c 1 python -m bench.estimate

For each model the report gives the share of the step of each kind of op, and plans. A plan that was
chosen with estimated costs is priced with measured ones:

* `own` is its predicted time ratio;
* `real` is its time ratio with measured costs;
* `best` is that of the plan chosen with measured costs;
* `peak` is its peak with measured workspaces, over the budget.

Time ratios are to the baseline with the same costs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from bench import command, models
from bench.command import Record
from bench.pages import filled
from rockmate import InfeasibleBudgetError, Plan, Planner
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph
from rockmate.schedule.simulate import simulate

MODELS = ("gpt2-deep", "bert-base", "llama", "vit-base", "resnet50")
BUDGETS = (0.5, 0.25)


def compare(
    name: str, machine: str, *, tiny: bool = False, budgets: Sequence[float] = BUDGETS
) -> Record:
    """Plans one model with measured and with estimated costs.

    Args:
        name: In `bench.models`.
        machine: As for `Planner`.
        tiny: Take the model for tests.
        budgets: Fractions of the baseline's peak.

    Returns:
        Estimated over measured time of a step, the shares of the step by kind of op, and a plan for
        each feasible budget. The misplaced share is that of the step which the estimate gives to
        other kinds of ops than the measurement: 0 is perfect, 1 the worst.
    """
    workload = models.build(name, tiny=tiny)
    # A plan in chunks is of another graph, which the other costs are not of.
    measured, estimated = (
        Planner(workload.model, workload.sample, machine=each, numerics="bitwise")
        for each in (None, machine)
    )
    ours, theirs = measured.plan(1.0), estimated.plan(1.0)
    same = ours.snapshot.fingerprint == theirs.snapshot.fingerprint
    assert same, "the two planners captured different graphs"
    own, other = _shares(ours.graph, ours.costs), _shares(theirs.graph, theirs.costs)
    return {
        "model": name,
        "total_ratio": estimated.baseline_ms / measured.baseline_ms,
        "kinds": [(kind, share, other[kind]) for kind, share in own.most_common()],
        "misplaced_share": sum(abs(own[kind] - other[kind]) for kind in own.keys() | other.keys())
        / 2,
        "plans": list(_plan_errors(measured, estimated, ours, budgets)),
    }


def _plan_errors(
    measured: Planner, estimated: Planner, reference: Plan, budgets: Sequence[float]
) -> Iterator[Record]:
    for budget in budgets:
        budget_bytes = int(budget * measured.baseline_peak_bytes)
        try:
            best, chosen = measured.plan(budget_bytes), estimated.plan(budget_bytes)
        except InfeasibleBudgetError:
            continue
        priced = simulate(reference.graph, chosen.schedule, reference.costs)
        yield {
            "budget": budget,
            "own": chosen.predicted_ratio,
            "real": priced.time_ms / measured.baseline_ms,
            "best": best.predicted_ratio,
            "peak": priced.peak_bytes / budget_bytes,
        }


def _shares(graph: Graph, costs: Costs) -> Counter[str]:
    times: Counter[str] = Counter()
    for op, cost in zip(graph.ops, costs.first, strict=True):
        target = op.node.target
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        times[
            str(getattr(packet, "__name__", packet)).removeprefix("_").removesuffix("_default")
        ] += cost.time_ms  # pyright: ignore
    total = sum(times.values())
    return Counter({kind: time_ms / total for kind, time_ms in times.items()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a report for each model."""
    parser = command.parser("estimate", __doc__, models=sorted(models.REGISTRY), tiny=True)
    machine = "name or description file of this machine"
    parser.add_argument("--machine", default="cpu-avx2", help=machine)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.model or MODELS:
        lines = filled("estimate", **compare(name, options.machine, tiny=options.tiny))
        sys.stdout.write("\n".join([*lines, "", ""]))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
