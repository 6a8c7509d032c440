"""Fingerprints of plans: what every model's plans cost, and a digest of each schedule.

    python -m bench.fingerprint --output plans.jsonl                        # minutes on one core
    python -m bench.fingerprint --tiny --compare bench/results/fingerprint_tiny.jsonl
    python -m bench.fingerprint --tiny --model mlp --compare bench/results/fingerprint_tiny.jsonl

The comparison shows whether a change of code changes a plan. Op costs are estimated for one CPU.
So equal code gives equal plans on every machine with the same versions of PyTorch, transformers and
the solvers. Python's hashes have a fixed seed: a model may go through a set of names when it is
built, as ModernBERT in transformers does, and its graph then depends on the seed.
Nothing is run or timed. The models are those of `bench.plan_quality`, and those whose step is no
chain of blocks.

Each model gives one line of kind `model`, with its baseline and smallest peak, and one line of kind
`plan` for each budget. The line of an infeasible budget has the smallest feasible peak instead.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from bench import command, models, plan_quality
from bench.command import Record
from bench.optima import TWO_LAYER_MODELS
from rockmate import InfeasibleBudgetError, Plan, Planner

MODELS = tuple(
    dict.fromkeys((*plan_quality.MODELS, *TWO_LAYER_MODELS, *models.BRANCHED, "gpt2-12"))
)
MACHINE = "cpu-avx2"
SMALLEST = "minimum"
BUDGETS = (0.9, 0.7, 0.5, 0.35, 0.25, SMALLEST)
"""Fractions of the baseline's peak, then the smallest feasible peak."""
TIME_LIMIT_S = 600.0
"""Of one solve. No solve comes near it: one that stops at its limit gives no reproducible plan."""
TOLERANCE = 1e-9
"""Relative, of times: the order of a sum may differ between processors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or compares fingerprints; 1 if one differs from the expected one."""
    parser = command.parser("fingerprint", __doc__, models=MODELS, tiny=True)
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="write JSON lines to FILE")
    add("--compare", type=Path, metavar="FILE", help="print the differences from FILE")
    options = parser.parse_args(arguments)
    if not (options.output or options.compare):
        parser.error("one of --output FILE and --compare FILE is needed")
    torch.set_num_threads(1)
    expected = command.read(options.compare) if options.compare else []
    known = {record["model"] for record in expected}
    names = options.model or [name for name in MODELS if not expected or name in known]
    found: list[Record] = []
    if options.output:
        options.output.unlink(missing_ok=True)
    for name in tqdm(names, unit="model"):
        own = list(fingerprint(name, is_tiny=options.tiny))
        for record in own if options.output else ():
            command.add_line(options.output, record)
        found += own
    if not options.compare:
        return 0
    lines = differences(found, [record for record in expected if record["model"] in names])
    sys.stdout.write("".join(f"{line}\n" for line in lines) or f"{len(found)} lines are equal\n")
    return 1 if lines else 0


def fingerprint(name: str, *, is_tiny: bool = False) -> Iterator[Record]:
    """The records of one model: first its baseline, then each budget.

    Args:
        name: of the model, in `bench.models.REGISTRY`.
        is_tiny: take the variant that tests use.
    """
    workload = models.build(name, tiny=is_tiny)
    planner = Planner(
        workload.model,
        workload.sample,
        machine=MACHINE,
        numerics="bitwise",
        time_limit_s=TIME_LIMIT_S,
    )
    yield {
        "kind": "model",
        "model": name,
        "baseline_peak_bytes": planner.baseline_peak_bytes,
        "baseline_ms": planner.baseline_ms,
        "minimum_peak_bytes": planner.minimum_peak_bytes,
    }
    for budget in BUDGETS:
        record = {"kind": "plan", "model": name, "budget": budget}
        budget_bytes = planner.minimum_peak_bytes if isinstance(budget, str) else budget
        try:
            yield record | _plan_record(planner.plan(budget_bytes))
        except InfeasibleBudgetError as error:
            yield record | {"infeasible_below_bytes": error.minimum_bytes}


def _plan_record(plan: Plan) -> Record:
    schedule, ops = plan.schedule, plan.snapshot.ops
    return {
        "peak_bytes": plan.predicted_peak_bytes,
        "time_ms": plan.predicted_ms,
        "bound_ms": plan.lower_bound_ms,
        "num_forward": len(schedule.forward),
        "schedule": _digest(ops[index].name for index in schedule.steps),
        "in_place": _digest(map(str, sorted(schedule.in_place))),
    }


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha1(" ".join(words).encode()).hexdigest()[:12]


def differences(found: Sequence[Record], expected: Sequence[Record]) -> list[str]:
    """One line of text for each field that differs and for each record without a partner."""
    ours, theirs = ({_key(record): record for record in side} for side in (found, expected))
    lines = []
    for key in dict.fromkeys((*theirs, *ours)):
        if key not in ours or key not in theirs:
            lines.append(f"{_label(key)}: {'unexpected' if key in ours else 'missing'}")
            continue
        own, other = ours[key], theirs[key]
        for field in dict.fromkeys((*other, *own)):
            if not _is_equal(own.get(field), other.get(field)):
                lines.append(
                    f"{_label(key)}: {field} is {own.get(field)}, expected {other.get(field)}"
                )
    return lines


def _key(record: Record) -> tuple[str, str]:
    return record["model"], str(record.get("budget", ""))


def _label(key: tuple[str, str]) -> str:
    model, budget = key
    return f"{model} at {budget}" if budget else model


def _is_equal(own: object, other: object) -> bool:
    if isinstance(own, float) and isinstance(other, float):
        return math.isclose(own, other, rel_tol=TOLERANCE)
    return own == other


def _run_with_fixed_hashes() -> int:
    """Runs `main` in a process whose hashes have a fixed seed."""
    if "PYTHONHASHSEED" in os.environ:
        return main()
    line = [sys.executable, "-m", "bench.fingerprint", *sys.argv[1:]]
    return subprocess.run(line, env=os.environ | {"PYTHONHASHSEED": "0"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(_run_with_fixed_hashes())
