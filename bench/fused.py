"""Fused kernels beside eager's, without recomputation and at shares of eager's peak.

    python -m bench.fused                        # all; bench/results/fused_cpu_<yyyymm>.*
    python -m bench.fused --model gpt2-12 --rounds 5 --output /tmp/fused
    python -m bench.fused --read                 # only the page

Each model trains in turn eager, and planned with eager's kernels and with fused ones: without
recomputation, and within shares of eager's peak. One thread; a round is one step of each; ratios
are medians over rounds of a step's time over eager's in the same round. Peaks are of one step by
the allocator's events, with `.grad` in place. Gradients are compared with eager's, and those of the
fused plans with each other, bit by bit. Writes STEM.jsonl, a line for each method, and STEM.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.comparison.lines import read
from bench.fused_page import SHARES, page
from bench.machine import machine_record
from bench.measure import allocator_peak, gradients_of, time_in_turn, training_step
from bench.models import Workload, build
from rockmate import InfeasibleBudgetError, Planner, RockmateModule

Record = dict[str, Any]
MODELS = (
    "gpt2-12", "gpt2-deep", "llama", "bert-base", "t5-small", "vit-small", "resnet50", "unet",
)  # fmt: skip
KERNELS = ("eager", "fused")
RESULTS = Path(__file__).parent / "results"


class Case:
    """One model, its planners, and the plans that are compared."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.batch = workload.make_batch(1)
        self.step_of(workload.model)()  # makes `.grad`
        workload.model.zero_grad(set_to_none=False)
        self.eager_peak_bytes = allocator_peak(self.step_of(workload.model))
        self.seconds: dict[str, float] = {}
        self.planners = {kernels: self._planner(kernels) for kernels in KERNELS}

    def _planner(self, kernels: str) -> Planner:
        begin = time.perf_counter()
        planner = Planner(
            self.workload.model,
            self.workload.sample,
            kernels=kernels,  # pyright: ignore[reportArgumentType]
            allow_chunking=False,
        )
        self.seconds[kernels] = time.perf_counter() - begin
        return planner

    def step_of(self, callee: Callable[..., Any]) -> Callable[[], Tensor]:
        """A training step of the model or of a module around it."""
        return partial(training_step, self.workload, callee, self.batch, seed=1)

    def modules(self) -> dict[str, RockmateModule]:
        """The planned modules by method; those that fit."""
        found = {}
        for kernels, planner in self.planners.items():
            for share in SHARES:
                budget = planner.baseline_peak_bytes
                if share is not None:
                    budget = min(budget, int(share * self.eager_peak_bytes))
                try:
                    found[f"{kernels}: {share or 'no recomputation'}"] = planner.module(budget)
                except InfeasibleBudgetError:
                    continue
        return found

    def gradients(self, callee: Callable[..., Any]) -> dict[str, Tensor]:
        """The gradients of one step."""
        self.workload.model.zero_grad(set_to_none=False)
        self.step_of(callee)()
        return gradients_of(self.workload.model)


def measured(workload: Workload, rounds: int) -> Iterator[Record]:
    """A record for each method of one model."""
    case = Case(workload)
    modules = case.modules()
    model = workload.model
    expected = case.gradients(model)
    found = {method: case.gradients(module) for method, module in modules.items()}
    peaks = {method: _peak(case, module) for method, module in modules.items()}
    steps = {"eager": case.step_of(model)}
    steps |= {method: case.step_of(module) for method, module in modules.items()}
    times = time_in_turn(steps, rounds, before=partial(model.zero_grad, set_to_none=False))
    first_fused = next(gradients for method, gradients in found.items() if "fused" in method)
    fusion = case.planners["fused"].fusion
    assert fusion is not None
    common = {
        "model": workload.name,
        "eager_peak_bytes": case.eager_peak_bytes,
        "num_places": fusion.num_places,
        "num_kernels": fusion.num_kernels,
        "compile_s": fusion.compile_s,
        "planner_s": case.seconds,
        **machine_record("bench.fused"),
    }
    for method, module in modules.items():
        plan = module.plan
        is_fused = method.startswith("fused")
        yield {
            **common,
            "method": method,
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted_peak_bytes,
            "peak_bytes": peaks[method],
            "predicted_ms": plan.predicted_ms,
            "ratio": times[method].ratio,
            "ratio_spread": times[method].ratio_spread,
            "error": _error(found[method], expected),
            "is_bitwise": _same(found[method], first_fused if is_fused else expected),
            "num_recomputed": plan.schedule.num_recomputations(),
        }


def _peak(case: Case, module: RockmateModule) -> int:
    case.step_of(module)()
    case.workload.model.zero_grad(set_to_none=False)
    return allocator_peak(case.step_of(module))


def _error(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of a gradient over the largest gradient of its parameter.

    Gradients that are zero in theory, such as those of key biases, are rounding in eager, too: they
    count against the largest gradient of all.
    """
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(
        float((mine[name] - value).abs().max() / value.abs().max().clamp_min(1e-4 * largest))
        for name, value in theirs.items()
    )


def _same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(mine[name], value) for name, value in theirs.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="small forms of the models")
    parser.add_argument("--read", action="store_true", help="only write the page")
    stem = RESULTS / f"fused_cpu_{time.strftime('%Y%m')}"
    parser.add_argument("--output", type=Path, default=stem, metavar="STEM")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = given.output.with_suffix(".jsonl")
    for name in () if given.read else given.model or MODELS:
        workload = build(name, tiny=given.tiny).with_loss_inside()
        with lines.open("a", encoding="utf-8") as file:
            for record in measured(workload, given.rounds):
                file.write(json.dumps(record) + "\n")
        sys.stderr.write(f"{name} done\n")
    text = "\n".join(page(read(lines))) + "\n"
    given.output.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
