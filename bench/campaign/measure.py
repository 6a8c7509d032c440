"""The cases of `bench.cuda`: each gives the figures of one model in one setting.

Peaks are those of the caching allocator in excess of the bytes before the step, with `.grad` in
place. On a CPU, for a rehearsal, they are those of the CPU's allocator, and nothing is capped.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from bench.measure import allocator_peak, time_in_turn, time_once
from bench.models.gpu import Batch, GpuModel
from rockmate import InfeasibleBudgetError, InfeasibleMemoryLimitError, Planner, RockmateModule
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.machine import load_machine
from rockmate.costs.measure import measure_costs
from rockmate.fusion.report import FusionReport
from rockmate.step import capture_step

Figures = Mapping[str, Any]
_NUM_ROUNDS = 7
_MACHINES = {"cuda": "h200", "cpu": "cpu-avx2"}


def release_memory() -> None:
    """Frees what the last case has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_step(call: Callable[..., Any], batch: Batch, *, seed: int = 0) -> None:
    """Forward and backward from a fixed random state."""
    torch.manual_seed(seed)
    output = call(**batch)
    (output["loss"] if isinstance(output, dict) else output.loss).backward()


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- correctness ----------------------------------------------------------------------------------


def correctness(model: GpuModel, device: torch.device) -> Figures:
    """Relative differences of gradients, by norm: planned against eager, and eager against eager.

    The second is the noise of kernels that add in another order at each run.
    """
    module = model.model(device)
    batch = model.batch(device, num_rows=min(model.num_rows, 4))
    planned = _planned(module, batch, 0.5)
    reference, repeated = _gradients(module, module, batch), _gradients(module, module, batch)
    ours = _gradients(planned, module, batch)
    return {
        "num_gradients": len(reference),
        "num_missing": len(reference.keys() ^ ours.keys()),
        "num_equal": sum(torch.equal(ours[name], each) for name, each in reference.items()),
        "planned_difference": _largest_difference(ours, reference),
        "eager_difference": _largest_difference(repeated, reference),
        "num_recomputations": planned.plan.schedule.num_recomputations(),
    }


def _gradients(call: Callable[..., Any], owner: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    owner.zero_grad(set_to_none=True)
    run_step(call, batch)
    named = owner.named_parameters()
    found = {name: each.grad.clone() for name, each in named if each.grad is not None}
    owner.zero_grad(set_to_none=True)
    return found


def _largest_difference(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> float:
    """The largest difference of a gradient by norm, relative to the mean norm of all."""
    norms = [each.double().norm().item() for each in reference.values()]
    scale = statistics.fmean(norms) or 1.0
    return max(
        (ours[name].double() - each.double()).norm().item() / max(norm, scale)
        for norm, (name, each) in zip(norms, reference.items(), strict=True)
    )


# --- one step in turn with eager ------------------------------------------------------------------


def planned_step(
    model: GpuModel, device: torch.device, share: float, *, is_fused: bool = False
) -> Figures:
    """Peaks and time of a planned step at a share of the baseline's peak.

    With fused kernels: also what they have brought, and their gradients' error.
    """
    module, batch = model.model(device), model.batch(device)
    begin = time.perf_counter()
    planned = _planned(module, batch, share, kernels="fused" if is_fused else "eager")
    figures = step_figures(planned, module, batch, device, time.perf_counter() - begin)
    report = planned.plan.fusion
    if not isinstance(report, FusionReport):
        return figures
    reference, ours = _gradients(module, module, batch), _gradients(planned, module, batch)
    return {
        **figures,
        "compile_s": round(report.compile_s, 2),
        "num_places": report.num_places,
        "num_kernels": report.num_kernels,
        "refusals": [group.refusal for group in report.groups if group.refusal],
        "difference": _largest_difference(ours, reference),
    }


def step_figures(
    planned: RockmateModule,
    module: nn.Module,
    batch: Batch,
    device: torch.device,
    planning_s: float,
) -> Figures:
    """Predicted and measured peaks and times of a planned step."""
    plan = planned.plan
    return {
        "planning_s": round(planning_s, 2),
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_ratio": plan.predicted_ratio,
        "predicted_ms": plan.predicted_ms,
        **against_eager(planned, module, batch, device),
    }


def _planned(
    module: nn.Module,
    batch: Batch,
    share: float,
    *,
    kernels: Literal["eager", "fused"] = "eager",
) -> RockmateModule:
    """A planned module at a share of the peak, or at the smallest peak if that is more."""
    planner = Planner(module, batch, outputs="loss", kernels=kernels)
    try:
        return planner.module(share, trial="never")
    except InfeasibleBudgetError:
        return planner.module(planner.minimum_peak_bytes, trial="never")


def peer_step(model: GpuModel, device: torch.device, peer: str) -> Figures:
    """Peaks and time of another way to train the model."""
    module, batch = model.model(device), model.batch(device)
    if peer == "compile":
        return against_eager(torch.compile(module), module, batch, device)
    if not getattr(module, "supports_gradient_checkpointing", False):
        return {"skipped": "the model has no activation checkpoints of its own"}

    def checkpointed(**arguments: Any) -> Any:
        module.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
        return module(**arguments)

    def plain(**arguments: Any) -> Any:
        module.gradient_checkpointing_disable()  # pyright: ignore
        return module(**arguments)

    return against_eager(checkpointed, module, batch, device, eager=plain)


def against_eager(
    ours: Callable[..., Any],
    module: nn.Module,
    batch: Batch,
    device: torch.device,
    *,
    eager: Callable[..., Any] | None = None,
) -> Figures:
    """Peaks of one step of each, and the median ratio of their times in turn."""
    calls = {"eager": eager or module, "own": ours}
    figures: dict[str, Any] = {}
    for name, call in calls.items():
        # Libraries allocate on first use, and gradients are made.
        for _ in range(2):
            run_step(call, batch)
        figures |= {f"{name}_{key}": size for key, size in _peaks(call, batch, device).items()}
    steps = {name: partial(run_step, call, batch) for name, call in calls.items()}
    times = time_in_turn(steps, _NUM_ROUNDS, device=device)
    return {
        **figures,
        "eager_ms": times["eager"].median_ms,
        "own_ms": times["own"].median_ms,
        "ratio": times["own"].ratio,
    }


def _peaks(call: Callable[..., Any], batch: Batch, device: torch.device) -> dict[str, int]:
    peak_bytes = allocator_peak(lambda: run_step(call, batch), device=device)
    if device.type == "cpu":
        return {"peak_bytes": peak_bytes}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_reserved(device)
    run_step(call, batch)
    torch.cuda.synchronize(device)
    reserved_bytes = torch.cuda.max_memory_reserved(device) - before_bytes
    return {"peak_bytes": peak_bytes, "reserved_bytes": reserved_bytes}


# --- op costs -------------------------------------------------------------------------------------


def op_costs(model: GpuModel, device: torch.device) -> Figures:
    """Estimated times of ops against measured ones, by kind of op, the largest total first."""
    step = capture_step(model.model(device), model.batch(device))
    measured = measure_costs(step.graph)
    estimated = estimate_costs(step.graph, load_machine(_MACHINES[device.type]))
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


# --- largest batch --------------------------------------------------------------------------------


def largest_batches(model: GpuModel, device: torch.device, cap_bytes: int) -> Figures:
    """The largest batch that trains under a cap on the device, planned and eager, and rows a ms."""
    with _capped(device, cap_bytes):
        return {
            name: _largest(lambda rows, t=trainer: t(model, device, rows, cap_bytes))
            for name, trainer in (("eager", _train_eager), ("planned", _train_planned))
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
    best, milliseconds, low, high = 0, 0.0, 0, 1
    while high <= 4096:
        time_ms = _attempt(train, high)
        if time_ms is None:
            break
        best, milliseconds, low, high = high, time_ms, high, 2 * high
    for _ in range(3):
        middle = (low + high) // 2
        if middle in (low, high):
            break
        time_ms = _attempt(train, middle)
        if time_ms is None:
            high = middle
        else:
            best, milliseconds, low = middle, time_ms, middle
    return {"rows": best, "rows_per_s": 1e3 * best / milliseconds if best else 0.0}


def _attempt(train: Callable[[int], float], rows: int) -> float | None:
    try:
        return train(rows)
    except (torch.OutOfMemoryError, InfeasibleBudgetError, InfeasibleMemoryLimitError):
        return None
    finally:
        release_memory()


def _train_eager(model: GpuModel, device: torch.device, rows: int, cap_bytes: int) -> float:
    if device.type == "cpu" and rows > 8:
        raise torch.OutOfMemoryError
    module = model.model(device)
    return _train(module, module, model.batch(device, num_rows=rows), device)


def _train_planned(model: GpuModel, device: torch.device, rows: int, cap_bytes: int) -> float:
    module, batch = model.model(device), model.batch(device, num_rows=rows)
    if device.type == "cpu":
        if rows > 8:
            raise torch.OutOfMemoryError
        return _train(_planned(module, batch, 0.5), module, batch, device)
    planned = RockmateModule(
        module, batch, memory_limit=cap_bytes, optimizer="sgd", outputs="loss", trial="never"
    )
    return _train(planned, module, batch, device)


def _train(
    call: Callable[..., Any], module: nn.Module, batch: Batch, device: torch.device
) -> float:
    """Milliseconds of the third step with plain gradient descent."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-5)
    time_ms = 0.0
    for _ in range(3):
        time_ms = time_once(partial(run_step, call, batch), device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return time_ms
