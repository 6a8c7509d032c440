"""Steps with the loss block in chunks: peaks and times beside eager's, and without chunks.

    taskset -c 1 python -m bench.loss_block
    taskset -c 1 python -m bench.loss_block --model gpt2 --budget minimum 0.2 0.5 --rounds 3

Each model computes its loss itself and returns nothing else (`outputs="loss"`). Budgets are
fractions of eager's peak, or "minimum". Peaks are the allocator's, with `.grad` in place. Times are
processor times of whole steps in turn, as median ratios to eager's in the same round. Prints one
JSON line for each point, then a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench import measure, models
from bench.machine import machine_record
from rockmate import InfeasibleBudgetError, Planner

Record = dict[str, Any]
MODELS = ("gpt2", "llama-vocabulary")
_COLUMNS = (
    "chunks",
    "budget",
    "plan",
    "predicted_mb",
    "measured_mb",
    "of_eager",
    "difference",
    "predicted_ratio",
    "ratio",
    "gradient",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and prints lines and a table for each model."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.loss_block", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", nargs="+", default=MODELS, help="names in `bench.models`")
    parser.add_argument(
        "--budget", nargs="+", default=["minimum", "0.1", "0.15", "0.2", "0.25", "0.5"]
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--tiny", action="store_true", help="models for tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    _say(json.dumps(machine_record("bench.loss_block")))
    for name in options.model:
        records = measure_model(
            models.build(name, tiny=options.tiny), options.budget, rounds=options.rounds
        )
        for record in records:
            _say(json.dumps({"model": name, **record}))
        _say(table(records))
    return 0


def measure_model(
    workload: models.Workload, budgets: Sequence[str], *, rounds: int
) -> list[Record]:
    """Eager, then each budget without chunks and with them where they are faster."""
    batch, model = workload.make_batch(1), workload.model
    steps: dict[str, Callable[[], Tensor]] = {"eager": _step(model, batch)}
    eager_bytes = _peak(model, steps["eager"])
    reference = measure.gradients_of(model)
    records: list[Record] = []
    planner = Planner(model, workload.sample, outputs="loss")
    for may_chunk in (False, True):
        for budget in budgets:
            record = _point(planner, may_chunk, batch, budget, eager_bytes, reference)
            records.append(
                {"chunks": may_chunk, "budget": budget, "eager_mb": eager_bytes / 1e6, **record}
            )
            if "module" in record:
                steps[f"{may_chunk} {budget}"] = _step(record["module"], batch)
    ratios = _ratios(model, steps, rounds)
    for record in records:
        record.pop("module", None)
        record["ratio"] = ratios.get(f"{record['chunks']} {record['budget']}")
    return records


def table(records: Sequence[Record]) -> str:
    """The records as a Markdown table."""
    rows = [" | ".join(_COLUMNS), " | ".join("---" for _ in _COLUMNS)]
    rows += [" | ".join(_text(record.get(name)) for name in _COLUMNS) for record in records]
    return "\n".join(f"| {row} |" for row in rows)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if 0 < abs(value) < 1e-3:
            return f"{value:.1e}"
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def _point(
    planner: Planner,
    may_chunk: bool,
    batch: Mapping[str, Tensor],
    budget: str,
    eager_bytes: int,
    reference: Mapping[str, Tensor],
) -> Record:
    budget_bytes = (
        planner.minimum_peak_bytes if budget == "minimum" else int(float(budget) * eager_bytes)
    )
    begin = time.process_time()
    try:
        module = planner.module(
            budget_bytes, strategy="rockmate" if may_chunk else "bitwise", trial="never"
        )
    except InfeasibleBudgetError:
        return {"plan": "infeasible"}
    plan_s = time.process_time() - begin
    model, plan = module.original, module.plan
    measured = _peak(model, _step(module, batch))
    gradient = max(
        _distance(tensor, reference[name]) for name, tensor in measure.gradients_of(model).items()
    )
    return {
        "plan": str(plan.options.loss_chunks or "whole"),
        "plan_s": plan_s,
        "predicted_mb": plan.predicted_peak_bytes / 1e6,
        "measured_mb": measured / 1e6,
        "of_eager": measured / eager_bytes,
        "difference": measured / plan.predicted_peak_bytes - 1,
        "predicted_ratio": plan.predicted_ratio,
        "gradient": gradient,
        "module": module,
    }


def _step(model: nn.Module, batch: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        torch.manual_seed(1)
        outputs = model(**batch)
        outputs.loss.backward()
        return outputs.loss.detach()

    return step


def _peak(model: nn.Module, step: Callable[[], Tensor]) -> int:
    """Peak of a step after a warm-up step, which allocates `.grad` and library buffers.

    The gradients of the measured step stay in `.grad`.
    """
    step()
    model.zero_grad(set_to_none=False)
    return measure.allocator_peak(step)


def _distance(ours: Tensor, reference: Tensor) -> float:
    return ((ours - reference).norm() / reference.norm()).item()


def _ratios(
    model: nn.Module, steps: Mapping[str, Callable[[], Tensor]], rounds: int
) -> dict[str, float]:
    """Processor seconds of each step over the first one's, the median over the rounds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            gc.collect()
            model.zero_grad(set_to_none=False)
            begin = time.process_time()
            step()
            times[name].append(time.process_time() - begin)
    first = next(iter(times.values()))
    return {
        name: statistics.median(mine / theirs for mine, theirs in zip(own, first, strict=True))
        for name, own in times.items()
    }


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
