"""Plans with moves for machines that are elsewhere.

Layers of Llama-8B at 8,192 tokens in bfloat16, loss only. Each budget is planned with recomputation
alone and with moves. Beside them stands what moving everything does, one copy at a time and each
waited for, as `torch.autograd.graph.save_on_cpu` does: it is not planned, so it has one point.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.command import Record
from bench.models import built, makers
from rockmate import InfeasibleBudgetError, Planner
from rockmate.plan.faults import fault_of
from rockmate.schedule.move import Move
from rockmate.schedule.schedule import with_moves
from rockmate.schedule.simulate import simulate

MACHINES = ("rtx4090", "h100")
NUM_LAYERS, NUM_TOKENS = 8, 8192
TIGHT = 1.2
"""The multiple of the least peak without moves at which tight plans are compared."""
_LLAMA, _WORDS = makers("large")["llama-3-8b"], 8192
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
"""Budgets, as shares of the peak without recomputation."""


def simulated(machine: str, *, num_layers: int, num_tokens: int) -> Iterator[Record]:
    """A record for each budget, and one for moving everything."""
    make = partial(_LLAMA, layers=num_layers, length=num_tokens, words=_WORDS)
    workload = built("llama", make, device="meta", dtype=torch.bfloat16)
    model, sample = workload.model, workload.sample
    options: dict[str, Any] = {"machine": machine, "outputs": "loss", "numerics": "bitwise"}
    begin = time.process_time()
    plain = Planner(model, sample, **options)
    plain_s = time.process_time() - begin
    begin = time.process_time()
    planner = Planner(model, sample, offload="host", **options)
    moving_s = time.process_time() - begin
    peak = plain.baseline_peak_bytes
    common = {
        "kind": "simulated",
        "machine_name": machine,
        "num_layers": num_layers,
        "num_tokens": num_tokens,
        "peak_bytes": peak,
        "baseline_ms": plain.baseline_ms,
        "least_share": plain.minimum_peak_bytes / peak,
        "least_with_moves_share": planner.minimum_peak_bytes / peak,
        "prepare_s": plain_s,
        "prepare_with_moves_s": moving_s,
    }
    least = plain.minimum_peak_bytes
    for budget in (*(int(share * peak) for share in SHARES), int(TIGHT * least)):
        yield {**common, **_planned(plain, planner, budget)}
    yield {**common, **_everything(plain, planner)}


def _planned(plain: Planner, planner: Planner, budget: int) -> Record:
    begin = time.process_time()
    without = _ratio(plain, budget)
    middle = time.process_time()
    plan = planner.plan(budget)
    end = time.process_time()
    assert not fault_of(plan.snapshot, plan.schedule)
    lanes = plan.simulation.lanes
    return {
        "share": budget / plain.baseline_peak_bytes,
        "recompute_ratio": without,
        "ratio": plan.predicted_ratio,
        "bound_ratio": plan.lower_bound_ms / plain.baseline_ms,
        "host_bytes": plan.simulation.host_bytes,
        "num_moves": len(plan.schedule.moves),
        "num_recomputations": plan.schedule.num_recomputations(),
        "waits_ratio": 0.0 if lanes is None else lanes.waited_ms / plain.baseline_ms,
        "plan_s": middle - begin,
        "plan_with_moves_s": end - middle,
    }


def _ratio(planner: Planner, budget: int) -> float | None:
    try:
        return planner.plan(budget).predicted_ratio
    except InfeasibleBudgetError:
        return None


def _everything(plain: Planner, planner: Planner) -> Record:
    """All values that cross the border move, each copy waited for; and our plan within its peak."""
    plan = planner.plan(planner.baseline_peak_bytes)
    residency, graph = plan.residency, plan.graph
    num_forward = len(plan.schedule.forward)
    moves = []
    for storage, intervals in residency.intervals.items():
        if not plan.snapshot.storages[storage].kind.is_movable:
            continue
        for interval in intervals:
            events = [interval.first, *interval.reads]
            before = [event for event in events if event < num_forward]
            behind = [event for event in events if event >= num_forward]
            if before and behind and storage not in plan.snapshot.updates:
                gone, back = before[-1] + 1, behind[0]
                moves.append(Move(storage=storage, send=gone, sent=gone, fetch=back, fetched=back))
    schedule = with_moves(graph, plan.schedule, moves)
    assert not fault_of(plan.snapshot, schedule)
    found = simulate(graph, schedule, plan.costs)
    # Where it needs a little less, since it moves the smallest values as well: the least of ours.
    ours = planner.plan(max(found.peak_bytes, planner.minimum_peak_bytes))
    return {
        "everything": True,
        "share": found.peak_bytes / plain.baseline_peak_bytes,
        "everything_ratio": found.time_ms / plain.baseline_ms,
        "host_bytes": found.host_bytes,
        "ratio": ours.predicted_ratio,
    }
