"""Training with moves to a folder of this machine, one thread, beside what the plan predicts.

Peaks come from the allocator's events, with the outputs held to the end of the backward, as a plan
counts them. Gradients are compared with eager's, bit for bit. Times are wall times, in turn with
the plan that moves and recomputes nothing.

The speeds of a machine that is shared change within minutes, those of its disk by a factor of
several. A planner measures them once. So the predicted time is the plan's replay at the speeds of
its row: ops take longer by the factor that the plan without moves does, and the rates of the disk
are the mean of those before the row's steps and after them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from bench.command import Record
from bench.measure import Step, Trainer, same_bits, time_in_turn
from bench.models import Workload, build, built, makers
from rockmate import Plan, Planner
from rockmate.costs.cost import Cost, Link
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.link import measure_disk_link
from rockmate.offload.tiers import forget_tiers, tier_of
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.simulate import simulate

SHARES = (0.8, 0.6, 0.4, 0.2, 0.05)
"""Budgets: shares of the way from the smallest peak to that without recomputation."""
NUM_ROUNDS = 7
_SMALL = makers("small")
MODELS = (*_SMALL, "bart", "two-streams", "densenet")


def workload_of(name: str) -> Workload:
    """The small model of that name, or the registry's, with its loss inside."""
    return (built(name, _SMALL[name]) if name in _SMALL else build(name)).with_loss_inside()


def measured(name: str, folder: str) -> Iterator[Record]:
    """A record for each budget of one model."""
    workload = workload_of(name)
    planner = Planner(workload.model, workload.sample, offload=f"disk:{folder}", numerics="bitwise")
    trainer = Trainer(workload)
    expected = trainer.gradients(workload.model)
    base = planner.module(1.0, trial="never")
    unmoved = trainer.gradients(base)
    least, peak = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    for share in SHARES:
        module = planner.module(int(least + share * (peak - least)), trial="never")
        disk = new_disk(workload.model, folder)
        ours = trainer.gradients(module)
        own_peak = trainer.peak_bytes(module)
        found = timed(trainer.step(base), base, trainer.step(module), module, folder)
        yield {
            "kind": "measured",
            "model": name,
            "is_bitwise": same_bits(ours, expected),
            "is_bitwise_unmoved": same_bits(ours, unmoved),
            "measured_peak_bytes": own_peak,
            "measured_host_bytes": disk.num_bytes,
            **planned(module.plan),
            **found,
        }


def planned(plan: Plan) -> Record:
    """What a plan promises."""
    return {
        "share": plan.budget_bytes / plan.baseline_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_host_bytes": plan.simulation.host_bytes,
        "num_moves": len(plan.schedule.moves),
        "num_recomputations": plan.schedule.num_recomputations(),
    }


def timed(base_step: Step, base: Any, own_step: Step, module: Any, folder: str) -> Record:
    """Times of both, in turn, and the predicted ones at the link's rates as they are now."""
    before = fresh_link(folder)
    times = time_in_turn({"base": base_step, "own": own_step}, NUM_ROUNDS, is_wall=True)
    link = _between(before, fresh_link(folder))
    base_ms = times["base"].median_ms
    speed = base_ms / base.plan.predicted_ms
    predicted_ms = time_at(module.plan, link, speed)
    return {
        "predicted_ratio": predicted_ms / base_ms,
        "measured_ratio": times["own"].ratio,
        "ratio_spread": times["own"].ratio_spread,
        "ops_factor": speed,
        "predicted_ms": predicted_ms,
        "planned_ms": module.plan.predicted_ms,
        "measured_ms": times["own"].median_ms,
        "out_gb_per_s": link.out_gb_per_s,
        "in_gb_per_s": link.in_gb_per_s,
        "slowdown": link.slowdown,
    }


def fresh_link(folder: str) -> Link:
    """The rates of the folder's disk, now."""
    return measure_disk_link(DiskTier(folder))


def _between(one: Link, other: Link) -> Link:
    """The link whose copies take the mean time of two."""
    return replace(
        one,
        out_gb_per_s=statistics.harmonic_mean([one.out_gb_per_s, other.out_gb_per_s]),
        in_gb_per_s=statistics.harmonic_mean([one.in_gb_per_s, other.in_gb_per_s]),
        latency_ms=statistics.fmean([one.latency_ms, other.latency_ms]),
        slowdown=statistics.fmean([one.slowdown, other.slowdown]),
    )


def time_at(plan: Plan, link: Link, ops_factor: float) -> float:
    """The plan's time if ops take so many times as long, with moves at the rates of a link."""

    def scaled(costs: Sequence[Cost]) -> tuple[Cost, ...]:
        return tuple(replace(cost, time_ms=ops_factor * cost.time_ms) for cost in costs)

    costs = replace(
        plan.costs,
        first=scaled(plan.costs.first),
        recompute=scaled(plan.costs.recompute),
        link=link,
    )
    return simulate(plan.graph, plan.schedule, costs).time_ms


def new_disk(model: nn.Module, folder: str) -> DiskTier:
    """A tier without files for the steps of a model, so that it has those of one plan alone."""
    forget_tiers(model)
    disk = tier_of(model, OffloadRequest("disk", folder))
    assert isinstance(disk, DiskTier)
    return disk
