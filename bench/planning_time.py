"""How long planning takes, in processor seconds of one thread: every time that is aimed at.

    taskset -c 0 python -m bench.planning_time     # writes bench/results/planning_time_cpu_<yyyymm>.*
    python -m bench.planning_time --model gpt2-12 --model sweep

Each case runs in a process of its own, so that none profits from what another one imported, solved
or measured, and none sees its garbage. A large Llama lies on the meta device and is planned for an
H100; the others are measured here. Costs are part of every time. A sweep is of 50 budgets, from a
fifth of the baseline's peak, or the smallest one, to all of it. `rockmate fit` is the command as a
user types it, interpreter and imports included. A process that takes longer than the limit is
stopped, and its row says so: RWKV of 12 layers and 1,024 tokens unrolls to some 1.2 million ops.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from bench import command, models
from bench.command import Record
from bench.models import Workload, built, makers
from bench.pages import about, filled
from rockmate import Planner
from rockmate.costs.machine import load_machine
from rockmate.planning.candidate import linspace_int
from rockmate.step import capture_step

_Made = TypeVar("_Made")
_RECURRENT = makers("recurrent")
MACHINE = "h100"
_FIRST = "costs and a first plan at 0.5, after capture"
_SECOND = "second plan, at the smallest peak"
_FROM_MODEL = "capture, costs and a first plan at 0.5"
_FRONTIER = "frontier of 17 budgets, after capture"
_CHUNKED = "plan at 0.25, in chunks if that is faster; only the loss returned"
_WHOLE = "the same without chunks"
_SWEEP = "sweep of 50 budgets, after capture"
_FIT = "largest batch on 24 GiB with LoRA"
_FIT_OPTIONS = (
    "--memory", "24GiB", "--lora", "--machine", "rtx4090", "--tokens", "4096", "--dtype",
    "bfloat16",
)  # fmt: skip


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
    times = [Timed(_FIRST, first_s, planner_s + first), Timed(_SECOND, second_s, second)]
    return Measured(num_ops, times)


def _in_chunks(name: str, *, target_s: float) -> Measured:
    workload = models.build(name).with_loss_inside()
    planner = Planner(workload.model, workload.sample, outputs="loss")
    whole = _seconds(lambda: planner.plan(0.25, strategy="bitwise"))[1]
    chunked = _seconds(lambda: planner.plan(0.25))[1]
    num_ops = len(planner.plan(1.0).graph.ops)
    times = [Timed(_WHOLE, target_s, whole), Timed(_CHUNKED, target_s, whole + chunked)]
    return Measured(num_ops, times)


def _sweep(name: str, *, target_s: float = 3.0) -> Measured:
    workload = models.build(name)
    step = capture_step(workload.model, workload.sample)
    num_ops = len(step.graph.ops)
    planner = Planner.of(step)
    peak_bytes = planner.baseline_peak_bytes
    lowest_bytes = max(planner.minimum_peak_bytes, peak_bytes // 5)
    seconds = _seconds(lambda: planner.plans(linspace_int(lowest_bytes, peak_bytes, 50)))[1]
    return Measured(num_ops, [Timed(_SWEEP, target_s, planner.timings["solve"] + seconds)])


def _recurrent(name: str, *, num_layers: int, num_tokens: int, target_s: float) -> Measured:
    own = built(name, partial(_RECURRENT[name], layers=num_layers, length=num_tokens))
    plan, seconds = _seconds(lambda: Planner(own.model, own.sample).plan(0.5))
    return Measured(len(plan.graph.ops), [Timed(_FROM_MODEL, target_s, seconds)])


def _large(name: str) -> Workload:
    return built(name, makers("large")[name], device="meta", dtype=torch.bfloat16)


def _first_plan(name: str, *, target_s: float) -> Measured:
    own = _large(name)
    plan, seconds = _seconds(lambda: Planner(own.model, own.sample, machine=MACHINE).plan(0.5))
    return Measured(len(plan.graph.ops), [Timed(_FROM_MODEL, target_s, seconds)])


def _frontier(name: str, *, target_s: float) -> Measured:
    workload = _large(name)
    step = capture_step(workload.model, workload.sample, machine=load_machine(MACHINE))
    num_ops = len(step.graph.ops)
    planner, planner_s = _seconds(lambda: Planner.of(step, machine=MACHINE))
    seconds = _seconds(planner.frontier)[1]
    return Measured(num_ops, [Timed(_FRONTIER, target_s, planner_s + seconds)])


def _fit(*, target_s: float) -> Measured:
    command_line = [sys.executable, "-m", "rockmate", "fit", "config.json", *_FIT_OPTIONS]
    config: Any = _large("llama-3-8b").model.config
    config.architectures = ["LlamaForCausalLM"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command_line, cwd=folder, check=True, stdout=sys.stderr)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    return Measured(0, [Timed(_FIT, target_s, seconds)])


_SHORT: dict[str, Any] = {"num_layers": 3, "num_tokens": 32, "target_s": 20.0}
_LONG: dict[str, Any] = {"num_layers": 12, "num_tokens": 1024, "target_s": 90.0}
_SWEPT = ("gpt2-12", "bert-narrow", "llama", "t5-small", "resnet50", "unet")
CASES: dict[str, Callable[[], Measured]] = {
    "gpt2": partial(_after_capture, "gpt2", first_s=3.0, second_s=1.0),
    "gpt2-12": partial(_after_capture, "gpt2-12", first_s=3.0, second_s=1.0),
    "gpt2-96": partial(_after_capture, "gpt2-96", first_s=5.0, second_s=4.0),
    "llama-3-70b": partial(_first_plan, "llama-3-70b", target_s=20.0),
    "llama-3-8b": partial(_frontier, "llama-3-8b", target_s=20.0),
    "llama-3-8b, rockmate fit": partial(_fit, target_s=90.0),
    **{
        f"{name}, loss": partial(_in_chunks, name, target_s=1.0)
        for name in ("gpt2-deep", "llama", "t5-small")
    },
    **{f"{name}, sweep": partial(_sweep, name) for name in _SWEPT},
    **{f"{name}, 3 layers, 32 tokens": partial(_recurrent, name, **_SHORT) for name in _RECURRENT},
    **{
        f"{name}, 12 layers, 1,024 tokens": partial(_recurrent, name, **_LONG)
        for name in _RECURRENT
    },
}


# --- page -------------------------------------------------------------------------------------


def records_of(case: str, measured: Measured) -> Iterator[Record]:
    """A record for each time of a case."""
    for each in measured.times:
        yield {"model": case, "num_ops": measured.num_ops, **each._asdict()}


def is_hit(record: Record) -> bool:
    """Whether a time is within its target; one that was stopped is not."""
    return record["figure_s"] is not None and record["figure_s"] <= record["target_s"]


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the number of targets that are hit as its headline."""
    newest = command.newest(records, "model", "what")
    lines = [{**record, "is_hit": is_hit(record)} for record in newest]
    num_hit = sum(record["is_hit"] for record in lines)
    number, head = len(newest), about(newest)
    return filled("planning_time", num_hit=num_hit, number=number, lines=lines, about=head)


def measured_apart(case: str, limit_s: int) -> list[Record]:
    """The records of a case, measured in a process of its own.

    Raises:
        CalledProcessError: the process failed, not for its time.
    """
    child = command.apart("planning_time", "--alone", case, "--limit", str(limit_s))
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        what = "stopped, nothing was planned"
        unknown = dict.fromkeys(("num_ops", "target_s", "figure_s"))
        return [{"model": case, "what": what, "limit_s": limit_s, **unknown}]
    child.check_returncode()
    num_ops, times = json.loads(child.stdout.splitlines()[-1])
    return list(records_of(case, Measured(num_ops, [Timed(*each) for each in times])))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the page."""
    parser = command.parser("planning_time", __doc__, stem="planning_time_cpu")
    add = parser.add_argument
    add("--model", action="append", metavar="NAME", help="cases whose name has this; repeatable")
    add("--limit", type=int, default=180, metavar="S", help="processor seconds of one process")
    add("--alone", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.alone:
        resource.setrlimit(resource.RLIMIT_CPU, (options.limit, options.limit + 5))
        sys.stdout.write(f"{json.dumps(CASES[options.alone]())}\n")
        return 0
    chosen = [case for case in CASES if any(name in case for name in options.model or [""])]
    if not chosen:
        parser.error(f"no case has one of these names; there are {', '.join(CASES)}")
    found = (record for case in chosen for record in measured_apart(case, options.limit))
    return command.run("planning_time", options, found, page)


if __name__ == "__main__":
    sys.exit(main())
