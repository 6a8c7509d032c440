"""Moves to another memory tier: simulated for GPUs, and measured with a disk on this machine.

    python -m bench.offload --simulated            # writes bench/results/offload_cpu_<yyyymm>.*
    python -m bench.offload --measured FOLDER      # lines are added

Simulated are layers of Llama-8B at 8,192 tokens in bfloat16, loss only. Each budget is planned with
recomputation alone and with moves. Beside them stands what moving everything does, one copy at a
time and each waited for, as `torch.autograd.graph.save_on_cpu` does: it is not planned, so it has
one point.

Measured is a training with moves to a folder, on one thread, beside what the plan predicts. Peaks
come from the allocator's events, with the outputs held to the end of the backward, as a plan counts
them. Gradients are compared with eager's, bit for bit. Times are wall times, in turn with the plan
that moves and recomputes nothing. The speeds of a machine that is shared change within minutes,
those of its disk by a factor of several. A planner measures them once. So the predicted time is the
plan's replay at the speeds of its row: ops take longer by the factor that the plan without moves
does, and the rates of the disk are the mean of those before the row's steps and after them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bench import command
from bench.command import Record
from bench.machine import machine_text
from bench.measure import Step, Trainer, same_bits, time_in_turn
from bench.models import Workload, build, built, makers
from bench.pages import filled
from rockmate import InfeasibleBudgetError, Plan, Planner
from rockmate.costs.cost import Cost, Link
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.link import measure_disk_link
from rockmate.offload.tiers import OF_MODEL, tier_of
from rockmate.plan.faults import fault_of
from rockmate.schedule.move import Move
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.schedule import with_moves
from rockmate.schedule.simulate import simulate

MACHINES = ("rtx4090", "h100")
NUM_LAYERS, NUM_TOKENS = 8, 8192
TIGHT = 1.2
"""The multiple of the least peak without moves at which tight plans are compared."""
_LLAMA, _WORDS = makers("large")["llama-3-8b"], 8192
SIMULATED_SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
"""Budgets, as shares of the peak without recomputation."""
SHARES = (0.8, 0.6, 0.4, 0.2, 0.05)
"""Budgets: shares of the way from the smallest peak to that without recomputation."""
NUM_ROUNDS = 7
_SMALL = makers("small")
MODELS = (*_SMALL, "bart", "two-streams", "densenet")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that was measured kept its promise."""
    parser = command.parser("offload", __doc__, stem="offload_cpu")
    add = parser.add_argument
    add("--simulated", action="store_true", help="plan for machines")
    add("--layers", type=int, default=NUM_LAYERS)
    add("--tokens", type=int, default=NUM_TOKENS)
    add("--measured", metavar="FOLDER", help="train with moves to a folder")
    add("--model", action="append", help="of a measured part; repeatable; default: all")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    command.run("offload", options, _records(options), page)
    return 0 if all(map(_is_held, command.read(command.lines_of(options)))) else 1


def page(records: Sequence[Record]) -> list[str]:
    """The targets, and a table for each machine and for the measured models."""
    machines = [machine_text(each) for each in {r["command"]: r for r in records}.values()]
    return filled("offload", machines="\n\n".join(machines), records=records, tight=TIGHT)


def _is_held(record: Record) -> bool:
    """Whether gradients of a record are eager's: those of one model without moves may differ."""
    return record.get("is_bitwise", True) or record.get("is_bitwise_unmoved", False)


def _records(arguments: argparse.Namespace) -> Iterator[Record]:
    if arguments.simulated:
        for machine in MACHINES:
            yield from simulated(machine, num_layers=arguments.layers, num_tokens=arguments.tokens)
    if arguments.measured:
        for name in arguments.model or MODELS:
            yield from measured(name, arguments.measured)


# --- simulated ----------------------------------------------------------------------------------


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
    for budget in (*(int(share * peak) for share in SIMULATED_SHARES), int(TIGHT * least)):
        yield {**common, **_beside(plain, planner, budget)}
    yield {**common, **_everything(plain, planner)}


def _beside(plain: Planner, planner: Planner, budget: int) -> Record:
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


# --- measured -----------------------------------------------------------------------------------


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
    OF_MODEL.pop(model, None)
    disk = tier_of(model, OffloadRequest("disk", folder))
    assert isinstance(disk, DiskTier)
    return disk


if __name__ == "__main__":
    sys.exit(main())
