"""The cases of `bench.cuda`: each gives the figures of one model in one setting.

Peaks are those of the caching allocator in excess of the bytes before the step, with `.grad` in
place. On a CPU, for a rehearsal, they are those of the CPU's allocator, nothing is capped, and
values move to a disk instead of the host. The peer copies them within its memory.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bench.measure import Trainer, allocator_peak, time_in_turn, time_once
from bench.models import Batch, Maker, Workload, built, makers
from rockmate import InfeasibleBudgetError, InfeasibleMemoryLimitError, Planner, RockmateModule
from rockmate.checks.run import host_waits
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.machine import load_machine
from rockmate.costs.measure import measure_costs
from rockmate.curves.measure import tensor_difference
from rockmate.fusion.report import FusionReport
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.pinned_tier import PinnedTier
from rockmate.offload.tiers import tier_of
from rockmate.planning.step import capture_step
from rockmate.planning.strategies import UNMOVED
from rockmate.schedule.lanes import LaneReplay

Figures = Mapping[str, Any]
Build = Callable[[], Workload]
_NUM_ROUNDS = 7
_kept: dict[Hashable, tuple[Workload, Planner, float]] = {}
_SMALL = 1e-3  # gradients that are smaller, as a share of the largest, may be all rounding


def builds(device: torch.device, *, tiny: bool) -> dict[str, Build]:
    """Name to what builds the model in bfloat16."""

    def build(name: str, make: Maker) -> Workload:
        return built(name, make, tiny=tiny, device=device, dtype=torch.bfloat16)

    return {name: partial(build, name, make) for name, make in makers("gpu").items()}


def release_memory() -> None:
    """Frees what the last cases have left."""
    _kept.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device(workload: Workload) -> torch.device:
    return next(workload.model.parameters()).device


# --- correctness ----------------------------------------------------------------------------------


def correctness(build: Build) -> Figures:
    """Relative differences of gradients: planned against eager, and eager against eager.

    The second is the noise of kernels that add in another order at each run.
    """
    workload, planner, _ = prepared(build)
    planned = _module(planner, 0.5)
    gradients = Trainer(workload).gradients
    reference, repeated, ours = map(gradients, (workload.model, workload.model, planned))
    return {
        "num_gradients": len(reference),
        "num_missing": len(reference.keys() ^ ours.keys()),
        "num_equal": sum(torch.equal(ours[name], each) for name, each in reference.items()),
        "planned_difference": tensor_difference(ours, reference, small=_SMALL).largest_relative,
        "eager_difference": tensor_difference(repeated, reference, small=_SMALL).largest_relative,
        "num_recomputations": planned.plan.schedule.num_recomputations(),
    }


# --- one step in turn with eager ------------------------------------------------------------------


def planned_step(build: Build, share: float, *, is_fused: bool = False) -> Figures:
    """Peaks and time of a planned step at a share of the baseline's peak.

    With fused kernels: also what they have brought, and their gradients' error.
    """
    workload, planner, prepared_s = prepared(build, **({"kernels": "fused"} if is_fused else {}))
    begin = time.perf_counter()
    planned = _module(planner, share)
    planning_s = prepared_s + time.perf_counter() - begin
    figures = step_figures(planned, workload, planning_s)
    report = planned.plan.fusion
    if not isinstance(report, FusionReport):
        return figures
    gradients = Trainer(workload, workload.make_batch(0)).gradients
    reference, ours = map(gradients, (workload.model, planned))
    return {
        **figures,
        "compile_s": round(report.compile_s, 2),
        "num_places": report.num_places,
        "num_kernels": report.num_kernels,
        "refusals": [group.refusal for group in report.groups if group.refusal],
        "difference": tensor_difference(ours, reference, small=_SMALL).largest_relative,
    }


def step_figures(planned: RockmateModule, workload: Workload, planning_s: float) -> Figures:
    """Predicted and measured peaks and times of a planned step."""
    plan = planned.plan
    return {
        "planning_s": round(planning_s, 2),
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_ratio": plan.predicted_ratio,
        "predicted_ms": plan.predicted_ms,
        **against_eager(workload, planned),
    }


def prepared(build: Build, **options: Any) -> tuple[Workload, Planner, float]:
    """A workload, its planner and the seconds that both took; kept for the next setting."""
    key = (build, *options.items())
    if key not in _kept:
        release_memory()
        begin = time.perf_counter()
        workload = build()
        planner = Planner(workload.model, workload.make_batch(0), outputs="loss", **options)
        _kept[key] = workload, planner, time.perf_counter() - begin
    return _kept[key]


def planned_module(workload: Workload, batch: Batch, share: float) -> RockmateModule:
    """A planned module at a share of the peak, or at the smallest peak if that is more."""
    return _module(Planner(workload.model, batch, outputs="loss"), share)


def _module(planner: Planner, share: float) -> RockmateModule:
    return planner.module(share, on_infeasible="least", trial="never")


def peer_step(build: Build, peer: str) -> Figures:
    """Peaks and time of another way to train the model."""
    workload = build()
    model: Any = workload.model
    if peer == "compile":
        return against_eager(workload, torch.compile(model))
    if not getattr(model, "supports_gradient_checkpointing", False):
        return {"skipped": "the model has no activation checkpoints of its own"}

    def checkpointed(**arguments: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model(**arguments)

    def plain(**arguments: Any) -> Any:
        model.gradient_checkpointing_disable()
        return model(**arguments)

    return against_eager(workload, checkpointed, eager=plain)


def against_eager(
    workload: Workload, ours: Callable[..., Any], *, eager: Callable[..., Any] | None = None
) -> Figures:
    """Peaks of one step of each, and the median ratio of their times in turn."""
    device, trainer = _device(workload), Trainer(workload)
    steps = {"eager": trainer.step(eager or workload.model), "own": trainer.step(ours)}
    figures: dict[str, Any] = {}
    for name, step in steps.items():
        # Libraries allocate on first use, and gradients are made.
        for _ in range(2):
            step()
        figures |= {f"{name}_{key}": size for key, size in _peaks(step, device).items()}
    times = time_in_turn(steps, _NUM_ROUNDS, device=device)
    return {
        **figures,
        "eager_ms": times["eager"].median_ms,
        "own_ms": times["own"].median_ms,
        "ratio": times["own"].ratio,
    }


def _peaks(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    peak_bytes = allocator_peak(step, device=device)
    if device.type == "cpu":
        return {"peak_bytes": peak_bytes}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_reserved(device)
    step()
    torch.cuda.synchronize(device)
    reserved_bytes = torch.cuda.max_memory_reserved(device) - before_bytes
    return {"peak_bytes": peak_bytes, "reserved_bytes": reserved_bytes}


# --- op costs -------------------------------------------------------------------------------------


def op_costs(build: Build) -> Figures:
    """Estimated times of ops against measured ones, by kind of op, the largest total first."""
    workload = build()
    step = capture_step(workload.model, workload.make_batch(0))
    measured = measure_costs(step.graph)
    estimated = estimate_costs(step.graph, load_machine(_machine_name(_device(workload))))
    totals: dict[str, list[float]] = {}
    for op, own, other in zip(step.graph.ops, measured.first, estimated.first, strict=True):
        name = str(getattr(op.node.target, "_opname", None) or op.node.target.__name__)  # pyright: ignore
        pair = totals.setdefault(name, [0.0, 0.0])
        pair[0], pair[1] = pair[0] + own.time_ms, pair[1] + other.time_ms
    largest = sorted(totals.items(), key=lambda item: -item[1][0])[:12]
    return {
        "measured_ms": sum(pair[0] for pair in totals.values()),
        "estimated_ms": sum(pair[1] for pair in totals.values()),
        "by_op": {name: [round(value, 4) for value in pair] for name, pair in largest},
    }


def _machine_name(device: torch.device) -> str:
    """The description of the card that is there, of an H100 for a card without one."""
    if device.type == "cpu":
        return "cpu-avx2"
    name = torch.cuda.get_device_name(device).lower()
    return next((each for each in ("h200", "a100", "l4") if each in name), "h100")


# --- largest batch --------------------------------------------------------------------------------


def largest_batches(build: Build, cap_bytes: int) -> Figures:
    """The largest batch that trains under a cap on the device, planned and eager, and its speed."""
    device = _device(build())
    release_memory()
    with _capped(device, cap_bytes):
        return {
            name: _largest(partial(_train, build, limit))
            for name, limit in (("eager", None), ("planned", cap_bytes))
        }


@contextmanager
def _capped(device: torch.device, cap_bytes: int) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _largest(train: Callable[[int], float]) -> dict[str, float]:
    """Doubles the rows until a batch does not fit, then halves the gap three times."""
    times_ms: dict[int, float] = {}
    low, high = 0, 1
    while high <= 4096 and (time_ms := _attempt(train, high)) is not None:
        times_ms[high] = time_ms
        low, high = high, 2 * high
    for _ in range(3):
        middle = (low + high) // 2
        time_ms = None if middle in (low, high) else _attempt(train, middle)
        if time_ms is None:
            high = middle
        else:
            times_ms[middle] = time_ms
            low = middle
    best = max(times_ms, default=0)
    return {"rows": best, "rows_per_s": 1e3 * best / times_ms[best] if best else 0.0}


def _attempt(train: Callable[[int], float], rows: int) -> float | None:
    try:
        return train(rows)
    except (torch.OutOfMemoryError, InfeasibleBudgetError, InfeasibleMemoryLimitError):
        return None
    finally:
        release_memory()


def _train(build: Build, limit_bytes: int | None, rows: int) -> float:
    """Milliseconds of the third step of plain gradient descent, planned where there is a limit."""
    workload = build()
    batch, model = workload.make_batch(0, rows), workload.model
    is_cpu = _device(workload).type == "cpu"
    if is_cpu and rows > 8:
        raise torch.OutOfMemoryError
    call: Callable[..., Any] = model
    if limit_bytes is not None and is_cpu:
        call = planned_module(workload, batch, 0.5)
    elif limit_bytes is not None:
        options: dict[str, Any] = {"optimizer": "sgd", "outputs": "loss", "trial": "never"}
        call = RockmateModule(model, batch, memory_limit=limit_bytes, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    time_ms = 0.0
    for _ in range(3):
        time_ms = time_once(Trainer(workload, batch).step(call), _device(workload))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return time_ms


# --- moves to the host --------------------------------------------------------------------------


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
