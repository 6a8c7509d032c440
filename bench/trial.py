"""What trials cost: steps that are held against eager, beside steps that are not.

    python -m bench.trial [--model gpt2] [--steps 1000]

One JSON line: the median step without a trial, the first step with one less that, the steps with a
trial later less that, and all trials of so many steps as a share of those steps' time. A step is a
forward and a backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from bench import models
from bench.machine import machine_record
from rockmate import Planner, RockmateModule

NUM_STEPS = 9  # trials are at 1, 2, 4 and 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the line."""
    parser = argparse.ArgumentParser(prog="python -m bench.trial", description="Cost of trials.")
    parser.add_argument("--model", default="gpt2", choices=sorted(models.REGISTRY))
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args(arguments)
    workload = models.build(given.model)
    planner = Planner(workload.model, workload.sample, numerics="bitwise")
    plan = planner.plan(given.budget)
    never = _seconds(planner.module_of(plan, trial="never"), workload)[1:]
    log = _seconds(planner.module_of(plan, trial="log"), workload)
    step_s = statistics.median(never)
    trial_s = statistics.median(log[step - 1] for step in (2, 4, 8)) - step_s
    num_trials = given.steps.bit_length()
    record = {
        "model": given.model,
        "step_ms": step_s * 1e3,
        "first_trial_ms": (log[0] - step_s) * 1e3,
        "trial_ms": trial_s * 1e3,
        "share": num_trials * trial_s / (given.steps * step_s),
        **machine_record("bench.trial"),
    }
    sys.stdout.write(json.dumps(record, default=str) + "\n")
    return 0


def _seconds(module: RockmateModule, workload: models.Workload) -> list[float]:
    found = []
    for step in range(NUM_STEPS):
        batch = workload.make_batch(step)
        begin = time.perf_counter()
        workload.loss(module, batch)[1].backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
        module.zero_grad(set_to_none=False)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
