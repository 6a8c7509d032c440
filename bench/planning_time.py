"""How long planning takes, in processor seconds of one thread: every time that is aimed at.

    taskset -c 0 python -m bench.planning_time                 # all rows; a quarter of an hour
    python -m bench.planning_time --model gpt2-12 --model rwkv
    python -m bench.planning_time --output bench/results/planning_time_cpu_<yyyymm>.md

Each case runs in a process of its own, so that none profits from what another one imported, solved
or measured, and none sees its garbage. A large Llama lies on the meta device and is planned for an
H100; the others are measured here. Costs are part of every time. A process that takes longer than
the limit is stopped, and its row says so: RWKV of 12 layers and 1,024 tokens unrolls to some 1.2
million ops.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bench import cluster, models
from bench.machine import machine_record
from bench.models import recurrent
from bench.models.recurrent import NAMES
from bench.pages import machine_section, table, table_row
from rockmate import Planner
from rockmate.costs.machine import load_machine
from rockmate.step import capture_step

_Made = TypeVar("_Made")
AFTER_CAPTURE = "costs and a first plan at 0.5, after capture"
SECOND = "second plan, at the smallest peak"
FROM_MODEL = "capture, costs and a first plan at 0.5"
FRONTIER = "frontier of 17 budgets, after capture"
CHUNKED = "plan at 0.25, in chunks if that is faster; only the loss returned"
WHOLE = "the same without chunks"
COLUMNS = ("model", "ops", "what", "reach, s", "figure, s", "")
MACHINE = "h100"
LENGTH = 8192


class Timed(NamedTuple):
    """One measured time: what took it, the target, the processor seconds."""

    what: str
    target_s: float
    figure_s: float


class Measured(NamedTuple):
    """The number of ops of a step, and what was timed."""

    num_ops: int
    times: list[Timed]


def _seconds(run: Callable[[], _Made]) -> tuple[_Made, float]:
    begin = time.process_time()
    return run(), time.process_time() - begin


# --- cases ------------------------------------------------------------------------------------


def _after_capture(name: str, *, first_s: float, second_s: float) -> Measured:
    workload = models.build(name)
    step = capture_step(workload.model, workload.sample)
    num_ops = len(step.graph.ops)  # The graph belongs to the capture.
    planner, planner_s = _seconds(lambda: Planner.of(step))
    first = _seconds(lambda: planner.plan(0.5))[1]
    second = _seconds(lambda: planner.plan(planner.minimum_peak_bytes))[1]
    times = [Timed(AFTER_CAPTURE, first_s, planner_s + first), Timed(SECOND, second_s, second)]
    return Measured(num_ops, times)


def _in_chunks(name: str, *, target_s: float) -> Measured:
    workload = models.build(name).with_loss_inside()
    planner = Planner(workload.model, workload.sample, outputs="loss")
    whole = _seconds(lambda: planner.plan(0.25, strategy="bitwise"))[1]
    chunked = _seconds(lambda: planner.plan(0.25))[1]
    num_ops = len(planner.plan(1.0).graph.ops)
    times = [Timed(WHOLE, target_s, whole), Timed(CHUNKED, target_s, whole + chunked)]
    return Measured(num_ops, times)


def _recurrent(name: str, *, num_layers: int, num_tokens: int, target_s: float) -> Measured:
    made = recurrent.recurrent(name, num_layers=num_layers, num_tokens=num_tokens)
    plan, seconds = _seconds(lambda: Planner(made.model, made.sample).plan(0.5))
    return Measured(len(plan.graph.ops), [Timed(FROM_MODEL, target_s, seconds)])


def _meta_llama(size: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Llama-3 on the meta device in bfloat16, and one sequence."""
    options = argparse.Namespace(model=size, layers=None, length=LENGTH, batch=1)
    model, sample = cluster.model_and_batch(options)
    return model.to(torch.bfloat16), sample


def _first_plan(size: str, *, target_s: float) -> Measured:
    model, sample = _meta_llama(size)
    plan, seconds = _seconds(lambda: Planner(model, sample, machine=MACHINE).plan(0.5))
    return Measured(len(plan.graph.ops), [Timed(FROM_MODEL, target_s, seconds)])


def _frontier(size: str, *, target_s: float) -> Measured:
    model, sample = _meta_llama(size)
    step = capture_step(model, sample, machine=load_machine(MACHINE))
    num_ops = len(step.graph.ops)
    planner, planner_s = _seconds(lambda: Planner.of(step, machine=MACHINE))
    seconds = _seconds(planner.frontier)[1]
    return Measured(num_ops, [Timed(FRONTIER, target_s, planner_s + seconds)])


_SHORT: dict[str, Any] = {"num_layers": 3, "num_tokens": 32, "target_s": 20.0}
_LONG: dict[str, Any] = {"num_layers": 12, "num_tokens": 1024, "target_s": 90.0}
CASES: dict[str, Callable[[], Measured]] = {
    "gpt2": partial(_after_capture, "gpt2", first_s=3.0, second_s=1.0),
    "gpt2-12": partial(_after_capture, "gpt2-12", first_s=3.0, second_s=1.0),
    "gpt2-96": partial(_after_capture, "gpt2-96", first_s=5.0, second_s=4.0),
    "llama-3-70b": partial(_first_plan, "70b", target_s=20.0),
    "llama-3-8b": partial(_frontier, "8b", target_s=20.0),
    "gpt2-deep, loss": partial(_in_chunks, "gpt2-deep", target_s=1.0),
    "llama, loss": partial(_in_chunks, "llama", target_s=1.0),
    "t5-small, loss": partial(_in_chunks, "t5-small", target_s=1.0),
    **{f"{name}, 3 layers, 32 tokens": partial(_recurrent, name, **_SHORT) for name in NAMES},
    **{f"{name}, 12 layers, 1,024 tokens": partial(_recurrent, name, **_LONG) for name in NAMES},
}


# --- page -------------------------------------------------------------------------------------


def rows(case: str, measured: Measured) -> list[tuple[str, ...]]:
    """The rows of a case."""
    num_ops = f"{measured.num_ops:,}"
    return [
        (
            *(case, num_ops, time.what, f"{time.target_s:g}", f"{time.figure_s:.2f}"),
            "hit" if time.figure_s <= time.target_s else "**miss**",
        )
        for time in measured.times
    ]


def page(found: Sequence[tuple[str, ...]], record: Mapping[str, Any]) -> str:
    """The page, with the number of targets that are hit as its headline."""
    num_hit = sum(row[-1] == "hit" for row in found)
    lines = [
        "# Time of planning",
        "",
        f"**{num_hit} of {len(found)} targets are hit.** Processor seconds of one thread; each "
        "model in a process of its own.",
        "",
        *table(COLUMNS, found),
        "",
        *machine_section(record),
    ]
    return "\n".join(lines) + "\n"


def rows_measured_apart(case: str, limit_s: int) -> list[tuple[str, ...]]:
    """The rows of a case, measured in a process of its own.

    Raises:
        CalledProcessError: the process failed, not for its time.
    """
    command = [sys.executable, "-m", "bench.planning_time", "--alone", case]
    command += ["--limit", str(limit_s)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return [(case, "", "stopped, nothing was planned", "", f"> {limit_s}", "**miss**")]
    child.check_returncode()
    num_ops, times = json.loads(child.stdout.splitlines()[-1])
    return rows(case, Measured(num_ops, [Timed(*each) for each in times]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.planning_time", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", action="append", metavar="NAME", help="cases whose name has this; repeatable")
    add("--output", type=Path, metavar="FILE", help="write the page there, too")
    add("--limit", type=int, default=180, metavar="S", help="processor seconds of one process")
    add("--alone", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.alone:
        resource.setrlimit(resource.RLIMIT_CPU, (options.limit, options.limit + 5))
        sys.stdout.write(f"{json.dumps(CASES[options.alone]())}\n")
        return
    chosen = [case for case in CASES if any(name in case for name in options.model or [""])]
    if not chosen:
        parser.error(f"no case has one of these names; there are {', '.join(CASES)}")
    record = machine_record("bench.planning_time")
    found: list[tuple[str, ...]] = []
    for case in tqdm(chosen, unit="case"):
        found += rows_measured_apart(case, options.limit)
        tqdm.write(table_row(found[-1]), file=sys.stderr)
    text = page(found, record)
    if options.output:
        options.output.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
