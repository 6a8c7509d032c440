"""How long planning takes, in processor seconds of one thread: every time that is aimed at.

    taskset -c 0 python -m bench.planning_time     # writes bench/results/planning_time_cpu_<yyyymm>.*
    python -m bench.planning_time --model gpt2-12 --model sweep

Each case runs in a process of its own, so that none profits from what another one imported, solved
or measured, and none sees its garbage. A large Llama lies on the meta device and is planned for an
H100; the others are measured here. Costs are part of every time. A sweep is of 50 budgets, from a
fifth of the baseline's peak, or the smallest one, to all of it. `rockmate fit` is the command as a
user types it, interpreter and imports included. "Starts" wraps the same model in two processes
in turn, which share a cache folder. A process that takes longer than the limit is stopped, and its
row says so: RWKV of 12 layers and 1,024 tokens unrolls to some 1.2 million ops.
"""  # noqa: E501

from __future__ import annotations

import os
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
from rockmate import Planner, RockmateModule
from rockmate.costs.machine import load_machine
from rockmate.entry import request
from rockmate.planning.candidate import linspace_int
from rockmate.planning.step import capture_step

_Made = TypeVar("_Made")
_RECURRENT = makers("recurrent")
MACHINE = "h100"
_FIT_OPTIONS = "--memory 24GiB --lora --machine rtx4090 --tokens 4096 --dtype bfloat16"


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


def _captured(own: Workload, machine: str | None = None) -> tuple[int, Planner, float]:
    """The number of ops of a step, its planner, and the seconds of the costs."""
    known = load_machine(machine) if machine else None
    step = capture_step(own.model, own.sample, machine=known)
    num_ops = len(step.graph.ops)  # The graph belongs to the capture.
    return num_ops, *_seconds(lambda: Planner.of(step, machine=machine))


def _after_capture(name: str, *, first_s: float, second_s: float) -> Measured:
    num_ops, planner, planner_s = _captured(models.build(name))
    first = planner_s + _seconds(lambda: planner.plan(0.5))[1]
    second = _seconds(lambda: planner.plan(planner.minimum_peak_bytes))[1]
    times = [Timed("costs and a first plan at 0.5, after capture", first_s, first)]
    return Measured(num_ops, [*times, Timed("second plan, at the smallest peak", second_s, second)])


def _in_chunks(name: str, *, target_s: float) -> Measured:
    workload = models.build(name).with_loss_inside()
    planner = Planner(workload.model, workload.sample, outputs="loss")
    whole = _seconds(lambda: planner.plan(0.25, strategy="bitwise"))[1]
    chunked = _seconds(lambda: planner.plan(0.25))[1]
    num_ops = len(planner.plan(1.0).graph.ops)
    what = "plan at 0.25, in chunks if that is faster; only the loss returned"
    times = [Timed("the same without chunks", target_s, whole)]
    return Measured(num_ops, [*times, Timed(what, target_s, whole + chunked)])


def _sweep(name: str, *, target_s: float = 3.0) -> Measured:
    num_ops, planner, _ = _captured(models.build(name))
    peak_bytes = planner.baseline_peak_bytes
    lowest_bytes = max(planner.minimum_peak_bytes, peak_bytes // 5)
    seconds = _seconds(lambda: planner.plans(linspace_int(lowest_bytes, peak_bytes, 50)))[1]
    seconds += planner.timings["solve"]
    return Measured(num_ops, [Timed("sweep of 50 budgets, after capture", target_s, seconds)])


def _recurrent(name: str, *, num_layers: int, num_tokens: int, target_s: float) -> Measured:
    make = partial(_RECURRENT[name], layers=num_layers, length=num_tokens)
    return _first_plan(built(name, make), target_s=target_s)


def _large(name: str) -> Workload:
    return built(name, makers("large")[name], device="meta", dtype=torch.bfloat16)


def _first_plan(own: Workload, *, target_s: float, machine: str | None = None) -> Measured:
    plan, seconds = _seconds(lambda: Planner(own.model, own.sample, machine=machine).plan(0.5))
    times = [Timed("capture, costs and a first plan at 0.5", target_s, seconds)]
    return Measured(len(plan.graph.ops), times)


def _frontier(name: str, *, target_s: float) -> Measured:
    num_ops, planner, seconds = _captured(_large(name), MACHINE)
    seconds += _seconds(planner.frontier)[1]
    return Measured(num_ops, [Timed("frontier of 17 budgets, after capture", target_s, seconds)])


def start(name: str, cache_folder: str) -> Iterator[list[float]]:
    """Wraps a model as a training that starts: the seconds of that, then of its capture."""
    os.environ["ROCKMATE_CACHE"] = cache_folder
    own, capture, capture_s = models.build(name), request.captured_step, list[float]()

    def timed(*given: Any) -> Any:
        step, seconds = _seconds(lambda: capture(*given))
        capture_s.append(seconds)
        return step

    request.captured_step = timed
    wrap_s = _seconds(lambda: RockmateModule(own.model, own.sample, 0.5))[1]
    yield [wrap_s, *capture_s]


def two_starts(name: str, **targets_s: float) -> Measured:
    """Planning in starts of one training with one cache folder; a target for each, by its name."""
    times = list[Timed]()
    with tempfile.TemporaryDirectory() as folder:
        for which, target_s in targets_s.items():
            _, [[wrap_s, capture_s]] = command.apart(start, name, folder)
            what = (
                f"{which} start: planning; wrapping {wrap_s:.2f}, capture {capture_s:.2f} of that"
            )
            times.append(Timed(what, target_s, wrap_s - capture_s))
    return Measured(0, times)


def _fit(*, target_s: float) -> Measured:
    command_line = [sys.executable, "-m", "rockmate", "fit", "config.json", *_FIT_OPTIONS.split()]
    config: Any = _large("llama-3-8b").model.config
    config.architectures = ["LlamaForCausalLM"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command_line, cwd=folder, check=True, stdout=sys.stderr)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    return Measured(0, [Timed("largest batch on 24 GiB with LoRA", target_s, seconds)])


_SWEPT = ("gpt2-12", "bert-narrow", "llama", "t5-small", "resnet50", "unet")
CASES: dict[str, Callable[[], Measured]] = {
    "gpt2": partial(_after_capture, "gpt2", first_s=3.0, second_s=1.0),
    "gpt2-12": partial(_after_capture, "gpt2-12", first_s=3.0, second_s=1.0),
    "gpt2-96": partial(_after_capture, "gpt2-96", first_s=5.0, second_s=4.0),
    "gpt2-12, starts": partial(two_starts, "gpt2-12", first=3.0, second=1.0),
    "llama-3-70b": lambda: _first_plan(_large("llama-3-70b"), target_s=20.0, machine=MACHINE),
    "llama-3-8b": partial(_frontier, "llama-3-8b", target_s=20.0),
    "llama-3-8b, rockmate fit": partial(_fit, target_s=90.0),
    **{
        f"{name}, loss": partial(_in_chunks, name, target_s=1.0)
        for name in ("gpt2-deep", "llama", "t5-small")
    },
    **{f"{name}, sweep": partial(_sweep, name) for name in _SWEPT},
    **{
        f"{name}, {layers} layers, {tokens:,} tokens": partial(
            _recurrent, name, num_layers=layers, num_tokens=tokens, target_s=target_s
        )
        for layers, tokens, target_s in ((3, 32, 20.0), (12, 1024, 90.0))
        for name in _RECURRENT
    },
}


# --- page -------------------------------------------------------------------------------------


def records_of(case: str, measured: Measured) -> Iterator[Record]:
    """A record for each time of a case."""
    for each in measured.times:
        yield {"model": case, "num_ops": measured.num_ops, **each._asdict()}


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the number of targets that are hit as its headline."""
    newest = command.newest(records, "model", "what")
    return filled("planning_time", lines=newest, about=about(newest))


def measured_apart(case: str, limit_s: int) -> list[Record]:
    """The records of a case, measured in a process of its own.

    Raises:
        RuntimeError: the process failed, not for its time.
    """
    status, found = command.apart(measured_alone, case, limit_s)
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        what = "stopped, nothing was planned"
        unknown = dict.fromkeys(("num_ops", "target_s", "figure_s"))
        return [{"model": case, "what": what, "limit_s": limit_s, **unknown}]
    if status:
        raise RuntimeError(f"{case} failed; see above")
    ((num_ops, times),) = found
    return list(records_of(case, Measured(num_ops, [Timed(*each) for each in times])))


def measured_alone(case: str, limit_s: int) -> Iterator[Measured]:
    """A case, in this process, which ends at the limit."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
    yield CASES[case]()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the page."""
    parser = command.parser("planning_time", __doc__, stem="planning_time_cpu")
    add = parser.add_argument
    add("--model", action="append", metavar="NAME", help="cases whose name has this; repeatable")
    add("--limit", type=int, default=180, metavar="S", help="processor seconds of one process")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [case for case in CASES if any(name in case for name in options.model or [""])]
    if not chosen:
        parser.error(f"no case has one of these names; there are {', '.join(CASES)}")
    found = (record for case in chosen for record in measured_apart(case, options.limit))
    return command.run("planning_time", options, found, page)


if __name__ == "__main__":
    sys.exit(main())
