"""The error of estimated costs, in the ratios that a plan depends on.

    taskset -c 1 python -m bench.estimate

For each model the report gives the share of the step of each kind of op, the backward's time over
the forward's, and plans. A plan that was chosen with estimated costs is priced with measured ones:

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
from typing import NamedTuple

import torch

from bench import command, models
from rockmate import InfeasibleBudgetError, Plan, Planner
from rockmate.costs.cost import Costs
from rockmate.graph.ir import Graph, Phase
from rockmate.schedule.simulate import simulate

MODELS = ("gpt2-deep", "bert-base", "llama", "vit-base", "resnet50")
BUDGETS = (0.5, 0.25)


class PlanError(NamedTuple):
    """A plan chosen with estimated costs, priced with measured ones: the columns of the report."""

    budget: float
    own_ratio: float
    real_ratio: float
    best_ratio: float
    peak_ratio: float


class ModelError(NamedTuple):
    """One model's estimate beside its measurement.

    Attributes:
        name: Of the model.
        total_ratio: Estimated over measured time of a step.
        shares: Share of the step by kind of op, measured and estimated.
        backward: Backward time over forward time, measured and estimated.
        plans: One for each feasible budget.
    """

    name: str
    total_ratio: float
    shares: tuple[Counter[str], Counter[str]]
    backward: tuple[float, float]
    plans: tuple[PlanError, ...]

    @property
    def misplaced_share(self) -> float:
        """Share of the step that the estimate gives to other kinds of ops than the measurement.

        0 is perfect, 1 the worst.
        """
        measured, estimated = self.shares
        kinds = measured.keys() | estimated.keys()
        return sum(abs(measured[kind] - estimated[kind]) for kind in kinds) / 2


def compare(
    name: str, machine: str, *, tiny: bool = False, budgets: Sequence[float] = BUDGETS
) -> ModelError:
    """Plans one model with measured and with estimated costs.

    Args:
        name: In `bench.models`.
        machine: As for `Planner`.
        tiny: Take the model for tests.
        budgets: Fractions of the baseline's peak.
    """
    workload = models.build(name, tiny=tiny)
    measured = Planner(workload.model, workload.sample)
    estimated = Planner(workload.model, workload.sample, machine=machine)
    ours, theirs = measured.plan(1.0), estimated.plan(1.0)
    same = ours.snapshot.fingerprint == theirs.snapshot.fingerprint
    assert same, "the two planners captured different graphs"
    return ModelError(
        name=name,
        total_ratio=estimated.baseline_ms / measured.baseline_ms,
        shares=(_shares(ours.graph, ours.costs), _shares(theirs.graph, theirs.costs)),
        backward=(
            _backward_ratio(ours.graph, ours.costs),
            _backward_ratio(theirs.graph, theirs.costs),
        ),
        plans=tuple(_plan_errors(measured, estimated, ours, budgets)),
    )


def _plan_errors(
    measured: Planner, estimated: Planner, reference: Plan, budgets: Sequence[float]
) -> Iterator[PlanError]:
    for budget in budgets:
        budget_bytes = int(budget * measured.baseline_peak_bytes)
        try:
            best, chosen = measured.plan(budget_bytes), estimated.plan(budget_bytes)
        except InfeasibleBudgetError:
            continue
        priced = simulate(reference.graph, chosen.schedule, reference.costs)
        yield PlanError(
            budget=budget,
            own_ratio=chosen.predicted_ratio,
            real_ratio=priced.time_ms / measured.baseline_ms,
            best_ratio=best.predicted_ratio,
            peak_ratio=priced.peak_bytes / budget_bytes,
        )


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


def _backward_ratio(graph: Graph, costs: Costs) -> float:
    forward = sum(
        cost.time_ms
        for op, cost in zip(graph.ops, costs.first, strict=True)
        if op.phase is Phase.FORWARD
    )
    return sum(cost.time_ms for cost in costs.first) / forward - 1


def report(error: ModelError, *, num_kinds: int = 10) -> str:
    """One model as text."""
    (measured, estimated), (own, other) = error.shares, error.backward
    lines = [
        f"{error.name}: step estimated at {error.total_ratio:.2f} of measured; backward / forward "
        f"{other:.2f} estimated, {own:.2f} measured; "
        f"share of time misplaced {error.misplaced_share:.1%}",
        "  budget    own   real   best   peak",
    ]
    for budget, *ratios in error.plans:
        lines.append(f"  {budget:6.2f} " + " ".join(f"{ratio:6.3f}" for ratio in ratios))
    lines.append("  measured  estimated  kind of op")
    for kind, share in measured.most_common(num_kinds):
        lines.append(f"  {share:8.1%}  {estimated[kind]:9.1%}  {kind}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a report for each model."""
    parser = command.parser("estimate", __doc__, models=sorted(models.REGISTRY), tiny=True)
    machine = "name or description file of this machine"
    parser.add_argument("--machine", default="cpu-avx2", help=machine)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.model or MODELS:
        sys.stdout.write(report(compare(name, options.machine, tiny=options.tiny)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
