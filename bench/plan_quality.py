"""How good plans are, beside a lower bound, other strategies, and what their ops take as measured.

    python -m bench.plan_quality            # all; writes bench/results/plan_quality_<yyyymm>.*
    python -m bench.plan_quality --model llama --share 0.5 --output X
    taskset -c 1 python -m bench.plan_quality --measured --output X

Nothing is trained. Op costs are estimated, so that equal code gives equal figures on every machine:
for one core of a CPU, and for an H100 the long steps, of over 2,000 ops each, whose models lie on
the meta device, in bfloat16 but for GPT-2. Budgets are shares of the baseline's peak; those below
the smallest peak are left out. Each model has a line for the step that returns its outputs, bit for
bit eager's, and one for the step that returns only its loss, which may run in chunks.

With `--measured`, plans that were chosen with estimated costs are priced with measured ones, by
ratios of times, which a plan depends on. `own` is the ratio that a plan predicts, `real` the one
with measured costs, `best` that of the plan chosen with measured costs, and `peak` the peak with
measured workspaces, over the budget.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from bench import command, models
from bench.command import Record
from bench.pages import about, filled
from rockmate import InfeasibleBudgetError, Plan, Planner
from rockmate.plan.faults import fault_of
from rockmate.schedule.simulate import simulate

MODELS = (
    "gpt2", "gpt2-deep", "bert-base", "bert-narrow", "llama", "t5-small", "vit-base", "resnet50",
    "qwen3", "mlp", "encoder", "hf-resnet", "regnet", "convnext", "qwen3-moe", "modernbert",
)  # fmt: skip
LONG = {
    "gpt2-96": models.REGISTRY["gpt2-96"],
    **models.makers("large"),
    "sdxl-unet": models.makers("gpu")["sdxl-unet"],
}
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
MEASURED_SHARES = (0.5, 0.25)
OTHERS = ("chen", "rotor")
STEPS: dict[str, dict[str, Any]] = {"all": {"numerics": "bitwise"}, "loss": {"outputs": "loss"}}
"""What a step returns -> how it is planned."""
TIME_LIMIT_S = 600.0  # of one search, as in `bench.fingerprint`: none comes near it
_NEAR = 0.001  # of a peak: how near the least bytes are that nothing is proved to fit in


def _workload(name: str, *, tiny: bool) -> models.Workload:
    if name not in LONG:
        return models.build(name, tiny=tiny)
    dtype = torch.float32 if name in models.REGISTRY else torch.bfloat16
    return models.built(name, LONG[name], tiny=tiny, device="meta", dtype=dtype)


# --- with estimated costs ---------------------------------------------------------------------


def planned(name: str, shares: Sequence[float], *, tiny: bool = False) -> Iterator[Record]:
    """A record for each kind of step of a model."""
    for outputs, options in STEPS.items():
        workload = _workload(name, tiny=tiny)
        workload = workload.with_loss_inside() if outputs == "loss" else workload
        how = {"machine": "h100" if name in LONG else "cpu-avx2", "time_limit_s": TIME_LIMIT_S}
        planner = Planner(workload.model, workload.sample, **how, **options)
        least = {  # in chunks where that is smaller
            each: planner.plan(1, strategy=each, on_infeasible="least").predicted_peak_bytes
            for each in (*OTHERS, "rockmate")
        }
        others = OTHERS if outputs == "all" else ()
        budgets = {share: int(share * planner.baseline_peak_bytes) for share in shares}
        yield {
            "model": name,
            "outputs": outputs,
            "num_ops": len(planner.plan(1.0).graph.ops),
            "baseline_peak_bytes": planner.baseline_peak_bytes,
            "least_bytes": least,
            "proved_bytes": _proved_bytes(planner, least["rockmate"]) if others else None,
            "plans": [
                {"share": share, **_figures(planner, budget, others)}
                for share, budget in budgets.items()
                if budget >= least["rockmate"]
            ],
        }


def _figures(planner: Planner, budget: int, others: Sequence[str]) -> Record:
    """Of the plan within a budget, with the times of others; times are over the baseline's."""
    plan = planner.plan(budget)
    bound = plan.lower_bound_ms / planner.baseline_ms
    found, ratio = _replayed(plan, planner)
    times = {each: _time_of(each, planner, budget) for each in others}
    return {
        "budget_bytes": budget,
        "peak_bytes": found,
        "ratio": ratio,
        "bound": bound,
        "gap": ratio - bound,
        "chunks": str(plan.options.loss_chunks or ""),
        "others": {name: time for name, time in times.items() if time is not None},
    }


def _replayed(plan: Plan, planner: Planner) -> tuple[int, float]:
    """Peak and time ratio of the replayed schedule, apart from the plan's own figures."""
    assert not fault_of(plan.snapshot, plan.schedule)
    simulation = simulate(plan.graph, plan.schedule, plan.costs)
    return simulation.peak_bytes, simulation.time_ms / planner.baseline_ms


def _time_of(strategy: str, planner: Planner, budget: int) -> float | None:
    try:
        return _replayed(planner.plan(budget, strategy=strategy), planner)[1]
    except InfeasibleBudgetError:
        return None


def _proved_bytes(planner: Planner, least: int) -> int:
    """Nearly the largest number of bytes that no schedule fits in: the bound is infinite there."""
    low, high = 0, least
    while high - low > _NEAR * least:
        middle = (low + high) // 2
        is_proved = math.isinf(planner.lower_bound_ms(middle))
        low, high = (middle, high) if is_proved else (low, middle)
    return low


# --- with measured costs ----------------------------------------------------------------------


def priced(name: str, shares: Sequence[float], *, tiny: bool = False) -> Record:
    """A model's plans by estimated costs, priced with measured ones, within feasible shares.

    The misplaced share is that of the step which the estimate gives to other kinds of ops than the
    measurement: 0 is perfect, 1 the worst.
    """
    workload = models.build(name, tiny=tiny)
    # A plan in chunks is of another graph, which the other costs are not of.
    measured, estimated = (
        Planner(workload.model, workload.sample, machine=each, numerics="bitwise")
        for each in (None, "cpu-avx2")
    )
    ours, theirs = measured.plan(1.0), estimated.plan(1.0)
    same = ours.snapshot.fingerprint == theirs.snapshot.fingerprint
    assert same, "the two planners captured different graphs"
    own, other = _times_by_kind(ours), _times_by_kind(theirs)
    prices = []
    for share in shares:
        budget = int(share * measured.baseline_peak_bytes)
        try:
            best, chosen = measured.plan(budget), estimated.plan(budget)
        except InfeasibleBudgetError:
            continue
        found = simulate(ours.graph, chosen.schedule, ours.costs)
        real = found.time_ms / measured.baseline_ms
        figures = {"own": chosen.predicted_ratio, "real": real, "best": best.predicted_ratio}
        prices.append({"share": share, **figures, "peak": found.peak_bytes / budget})
    return {
        "model": name,
        "outputs": "measured",
        "total_ratio": estimated.baseline_ms / measured.baseline_ms,
        "misplaced": sum(abs(own[kind] - other[kind]) for kind in own | other) / 2,
        "prices": prices,
    }


def _times_by_kind(plan: Plan) -> Counter[str]:
    """Kind of op -> its share of the time of the baseline."""
    times: Counter[str] = Counter()
    for op, cost in zip(plan.graph.ops, plan.costs.first, strict=True):
        times[str(getattr(op.node.target, "overloadpacket", op.node.target))] += cost.time_ms  # pyright: ignore
    total = sum(times.values())
    return Counter({kind: time_ms / total for kind, time_ms in times.items()})


# --- the command ------------------------------------------------------------------------------


def _measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    if not options.measured:
        yield from planned(name, options.share or SHARES, tiny=options.tiny)
    elif name not in LONG:
        yield priced(name, options.share or MEASURED_SHARES, tiny=options.tiny)


def page(records: Sequence[Record]) -> list[str]:
    """Targets, gaps and smallest peaks of each kind of step, and prices."""
    newest = command.newest(records, "model", "outputs")
    lines = [each for each in newest if "plans" in each]
    plans = [each | {"model": line["model"]} for line in lines for each in line["plans"]]
    return filled(
        "plan_quality",
        lines=lines,
        plans=plans,
        shares=list(dict.fromkeys(each["share"] for each in plans)),
        median=statistics.median(each["gap"] for each in plans) if plans else math.nan,
        rising=[line["model"] for line in lines if _is_rising(line["plans"])],
        priced=[each for each in newest if "prices" in each],
        about=about(newest, __doc__),
    )


def _is_rising(plans: Sequence[Record]) -> bool:
    """Whether a plan is slower than one for less memory."""
    ordered = sorted(plans, key=lambda each: each["budget_bytes"])
    return any(more["ratio"] > less["ratio"] * (1 + 1e-9) for less, more in pairwise(ordered))


_FURTHER = {
    "--share": {"action": "append", "type": float, "help": "of the peak; repeatable"},
    "--measured": {"action": "store_true", "help": "price plans with measured costs"},
}
main = command.main_of(
    "plan_quality", __doc__, _measured, page, models=(*MODELS, *LONG), tiny=True,
    stem="plan_quality", further=_FURTHER,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
