"""The part of `bench.cuda` with moves to the host: overlap, bytes there, and PyTorch's own hooks.

On a CPU, for a rehearsal, values move to a disk, and so do those of the peer.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.campaign.measure import Figures, against_eager, run_step, step_figures, synchronize
from bench.models.gpu import Batch, GpuModel
from bench.peers.disk import DiskStash
from rockmate import InfeasibleBudgetError, Planner
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.pinned_tier import PinnedTier
from rockmate.offload.tiers import tier_of
from rockmate.planning.strategies import UNMOVED
from rockmate.schedule.lanes import LaneReplay


def offloaded_step(model: GpuModel, device: torch.device, share: float) -> Figures:
    """A planned step with moves at a share of the peak, and the plan of that budget without."""
    with _tier(device) as offload:
        module, batch = model.model(device), model.batch(device)
        begin = time.perf_counter()
        planner = Planner(module, batch, outputs="loss", offload=offload)
        budget = max(int(share * planner.baseline_peak_bytes), planner.minimum_peak_bytes)
        planned = planner.module(budget, trial="never")
        planning_s = time.perf_counter() - begin
        plan, lanes = planned.plan, planned.plan.simulation.lanes
        figures = {
            **step_figures(planned, module, batch, device, planning_s),
            **_link_figures(plan.costs.link),
            "num_moves": len(plan.schedule.moves),
            "num_recomputations": plan.schedule.num_recomputations(),
            "predicted_waits_ms": lanes.waited_ms if isinstance(lanes, LaneReplay) else 0.0,
            "predicted_host_bytes": plan.simulation.host_bytes,
            "host_bytes": _host_bytes(module, plan.offload),
            "num_host_waits": _num_host_waits(planned, batch, device),
            "eager_host_waits": _num_host_waits(module, batch, device),
        }
        return {**figures, **_without_moves(planner, budget, module, batch, device)}


def save_on_cpu_step(model: GpuModel, device: torch.device) -> Figures:
    """Peaks and time of `torch.autograd.graph.save_on_cpu(pin_memory=True)`."""
    module, batch = model.model(device), model.batch(device)
    with tempfile.TemporaryDirectory() as folder:
        hooks = _hooks(module, device, folder)

        def call(**arguments: Any) -> Any:
            with hooks():
                return module(**arguments)

        return against_eager(call, module, batch, device)


def _hooks(
    module: nn.Module, device: torch.device, folder: str
) -> Callable[[], AbstractContextManager[Any]]:
    if device.type == "cuda":
        return partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
    stash = DiskStash(DiskTier(folder), 0, module.parameters())
    return partial(torch.autograd.graph.saved_tensors_hooks, stash.pack, stash.unpack)


@contextmanager
def _tier(device: torch.device) -> Iterator[str]:
    """The `offload` argument for a device."""
    if device.type == "cuda":
        yield "host"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield f"disk:{folder}"


def _link_figures(link: Any) -> Figures:
    names = ("out_gb_per_s", "in_gb_per_s", "latency_ms", "duplex", "slowdown")
    return {name: getattr(link, name) for name in names}


def _host_bytes(module: nn.Module, request: Any) -> int:
    """Bytes that the tier of a model has taken, for all plans so far."""
    tier = tier_of(module, request)
    assert isinstance(tier, DiskTier | PinnedTier)
    return tier.num_bytes


def _num_host_waits(call: Callable[..., Any], batch: Batch, device: torch.device) -> int:
    """How often the host waits for the device in a step; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    run_step(call, batch)
    synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run_step(call, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in found)


def _without_moves(
    planner: Planner, budget: int, module: nn.Module, batch: Batch, device: torch.device
) -> Figures:
    """Times of the plan of the same budget that recomputes alone; empty if there is none."""
    try:
        planned = planner.module(budget, strategy=UNMOVED, trial="never")
    except InfeasibleBudgetError:
        return {}
    found = against_eager(planned, module, batch, device)
    return {
        "recompute_ratio": found["ratio"],
        "predicted_recompute_ratio": planned.plan.predicted_ratio,
    }
