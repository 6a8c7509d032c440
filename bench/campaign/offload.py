"""The part of `bench.cuda` with moves to the host: overlap, bytes there, and PyTorch's own hooks.

On a CPU, for a rehearsal, values move to a disk; the peer copies them within its memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.campaign.measure import Build, Figures, against_eager, prepared, step_figures
from bench.measure import Trainer
from bench.models import Workload
from rockmate import InfeasibleBudgetError, Planner
from rockmate.checks.run import host_waits
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.pinned_tier import PinnedTier
from rockmate.offload.tiers import tier_of
from rockmate.planning.strategies import UNMOVED
from rockmate.schedule.lanes import LaneReplay


def offloaded_step(build: Build, share: float) -> Figures:
    """A planned step with moves at a share of the peak, and the plan of that budget without."""
    offload = "host" if torch.cuda.is_available() else f"disk:{tempfile.gettempdir()}"
    workload, planner, prepared_s = prepared(build, offload=offload)
    begin = time.perf_counter()
    budget = max(int(share * planner.baseline_peak_bytes), planner.minimum_peak_bytes)
    planned = planner.module(budget, trial="never")
    planning_s = prepared_s + time.perf_counter() - begin
    plan, lanes = planned.plan, planned.plan.simulation.lanes
    figures = step_figures(planned, workload, planning_s)
    link = ("out_gb_per_s", "in_gb_per_s", "latency_ms", "duplex", "slowdown")
    assert plan.offload is not None
    tier = tier_of(workload.model, plan.offload)
    assert isinstance(tier, DiskTier | PinnedTier)
    return {
        **figures,
        **{name: getattr(plan.costs.link, name) for name in link},
        "num_moves": len(plan.schedule.moves),
        "num_recomputations": plan.schedule.num_recomputations(),
        "predicted_waits_ms": lanes.waited_ms if isinstance(lanes, LaneReplay) else 0.0,
        "predicted_host_bytes": plan.simulation.host_bytes,
        "host_bytes": tier.num_bytes,
        "num_host_waits": _num_host_waits(Trainer(workload).step(planned)),
        "eager_host_waits": _num_host_waits(Trainer(workload).step(workload.model)),
        **_without_moves(planner, budget, workload),
    }


def save_on_cpu_step(build: Build) -> Figures:
    """Peaks and time of `torch.autograd.graph.save_on_cpu(pin_memory=True)`."""
    workload = build()

    def call(**arguments: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return workload.model(**arguments)

    return against_eager(workload, call)


def _num_host_waits(step: Callable[[], object]) -> int:
    """How often the host waits for the device in a step; 0 without a device."""
    if not torch.cuda.is_available():
        return 0
    step()
    torch.cuda.synchronize()
    return host_waits(step).total()


def _without_moves(planner: Planner, budget: int, workload: Workload) -> Figures:
    """Times of the plan of the same budget that recomputes alone; empty if there is none."""
    try:
        planned = planner.module(budget, strategy=UNMOVED, trial="never")
    except InfeasibleBudgetError:
        return {}
    found = against_eager(workload, planned)
    return {
        "recompute_ratio": found["ratio"],
        "predicted_recompute_ratio": planned.plan.predicted_ratio,
    }
