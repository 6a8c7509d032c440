"""Frames beside eager, checkpoints and plans: models without one graph, and two controls.

    python -m bench.frames                       # all; bench/results/frames_cpu_<yyyymm>.*
    python -m bench.frames --model detector --output /tmp/frames
    python -m bench.frames --page                # only the page

Each model trains in turn eager, in frames at shares of eager's peak, with one checkpoint around
each of the modules whose calls are frames, and in frames at the peak of those checkpoints. Controls
have a plan at the same shares beside them. One thread; a round is one step of each; ratios are
medians over rounds of a step's processor time over eager's in the same round. Peaks are the
largest of three steps by the allocator's events, batches in place. Bits of losses, gradients and
buffers are compared over three steps. The bound of a time is eager's and the least seconds that any
choice within the budget takes, of all that frames offer, by the times of the first steps. Writes
STEM.jsonl, a line for each method, and STEM.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from bench import command
from bench.command import Record
from bench.machine import machine_text
from bench.measure import allocator_peak, time_in_turn
from bench.models import dynamic
from bench.pages import all_row, records_table, targets, worst_row
from bench.peers.checkpoint import replaced_forwards
from rockmate import RockmateModule

SEEDS = (0, 1, 2)


SHARES = (1.1, 0.6, 0.4, 0.25)
"""Budgets, as shares of eager's peak."""

TIME_AT = {1.1: 1.02, 0.6: 1.12, 0.4: 1.25, 0.25: 1.35}
"""Targets of the time over eager's at each budget."""

TIME_OVER_PLAN = 1.15
"""Target of the time over that of a plan at the same budget."""

OVER_BUDGET = 1.01
"""Target of the measured peak over the budget, or over the smallest peak where that is larger."""


class Trained:
    """A copy of a model, and how its steps are run."""

    def __init__(self, made: dynamic.Dynamic, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self._model = copy.deepcopy(made.model)
        self.module = wrap(self._model)
        self._make_batch, self._num_timed = made.make_batch, 0
        self.first_numbers = self._numbers()

    def step(self, seed: int) -> Tensor:
        """Forward and backward; gradients add up."""
        return self._step(seed, self._make_batch(seed))

    def _step(self, seed: int, batch: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(seed)
        loss = self.module(**batch)
        loss.backward()
        runner = self.module.frames if isinstance(self.module, RockmateModule) else None
        if runner is not None:
            runner.end_recording()  # if some frame had no backward: the meter needs the profiler
        return loss.detach()

    def _numbers(self) -> list[Tensor]:
        """Losses, gradients and buffers of three steps."""
        numbers = []
        for seed in SEEDS:
            self._model.zero_grad(set_to_none=True)
            numbers.append(self.step(seed))
            grads = [each.grad for each in self._model.parameters()]
            numbers += [grad.clone() for grad in grads if grad is not None]
        return numbers + [each.clone() for each in self._model.buffers()]

    def peak_bytes(self) -> int:
        """The largest peak of the steps, with gradients and batches in place."""
        self.step(SEEDS[0])
        self._model.zero_grad(set_to_none=False)
        batches = {seed: self._make_batch(seed) for seed in SEEDS}
        return max(allocator_peak(partial(self._step, *each)) for each in batches.items())

    def next_step(self) -> None:
        """A step with gradients in place; the seeds take turns."""
        self.step(SEEDS[self._num_timed % len(SEEDS)])
        self._num_timed += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the page."""
    parser = command.parser(
        "frames", __doc__, models=dynamic.NAMES, rounds=7, tiny=True, stem="frames_cpu"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = (
        record
        for name in tqdm(options.model or dynamic.NAMES, unit="model")
        for record in _measured(name, options)
    )
    return command.run("frames", options, found, page)


def _measured(name: str, options: argparse.Namespace) -> list[Record]:
    """All methods on one model."""
    made = dynamic.build(name, tiny=options.tiny)
    eager = Trained(made, lambda model: model)
    eager_bytes = eager.peak_bytes()
    methods: dict[str, tuple[Trained, int | None]] = {"eager": (eager, None)}
    for share in SHARES:
        budget = int(share * eager_bytes)
        methods[f"frames: {share}"] = Trained(made, partial(_framed, budget=budget)), budget
        if name in dynamic.CONTROLS:
            planned = partial(RockmateModule, budget=budget, on_infeasible="least")
            methods[f"plan: {share}"] = Trained(made, partial(planned, sample_input=None)), budget
    free, _ = methods[f"frames: {SHARES[0]}"]
    paths = _paths_of(free)
    checkpointed = Trained(made, lambda model: _Checkpointed(model, paths))
    methods["checkpoint"] = checkpointed, None
    budget = checkpointed.peak_bytes()
    methods["frames: as checkpoint"] = Trained(made, partial(_framed, budget=budget)), budget
    records: dict[str, Record] = {}
    for method, (trained, budget) in methods.items():
        pairs = zip(trained.first_numbers, eager.first_numbers, strict=True)
        same = [torch.equal(one, other) for one, other in pairs]
        records[method] = {
            "model": name, "method": method, "budget_bytes": budget,
            "is_bitwise": all(same), "peak_bytes": trained.peak_bytes(),
            "eager_bytes": eager_bytes,
        } | _frames_record(trained)  # fmt: skip
    steps = {method: trained.next_step for method, (trained, _) in methods.items()}
    for method, times in time_in_turn(steps, options.rounds, collects=False).items():
        records[method] |= {"seconds": times.median_ms / 1e3, "ratio": times.ratio}
    return list(records.values())


def _framed(model: nn.Module, budget: int) -> nn.Module:
    return RockmateModule(model, None, budget, mode="frames", on_infeasible="least", trial="never")


def _paths_of(trained: Trained) -> tuple[str, ...]:
    for seed in SEEDS:
        trained.step(seed)
    assert isinstance(trained.module, RockmateModule)
    assert trained.module.frames is not None
    return trained.module.frames.paths


def _frames_record(trained: Trained) -> Record:
    runner = trained.module.frames if isinstance(trained.module, RockmateModule) else None
    if runner is None or runner.needs is None:
        return {}
    report = runner.report()
    return {
        "minimum_bytes": runner.needs.minimum_bytes,
        "bound_s": None if report is None else report.bound_s,
        "num_frames": runner.counts.num_frames,
        "num_recomputed": runner.counts.num_recomputed,
    }


class _Checkpointed(nn.Module):
    """A model with one checkpoint around each call of some submodules."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        super().__init__()
        self.model, self.paths = model, paths

    def forward(self, **batch: Tensor) -> Tensor:
        with self._checkpoints():
            return self.model(**batch)

    @contextmanager
    def _checkpoints(self) -> Iterator[None]:
        modules = [self.model.get_submodule(path) for path in self.paths]
        wrapped = {
            each: partial(checkpoint, each.forward, use_reentrant=False, preserve_rng_state=True)
            for each in modules
        }
        with replaced_forwards(wrapped):
            yield


# --- page -------------------------------------------------------------------------------------


def page(lines: Sequence[Record]) -> list[str]:
    """Targets, and a table for each model."""
    newest = {(line["model"], line["method"]): line for line in lines}
    names = list(dict.fromkeys(name for name, _ in newest))
    text = ["# Frames beside eager, checkpoints and plans", "", machine_text(lines[-1]), ""]
    text += [*_targets(newest, names), ""]
    for name in names:
        own = {method: line for (model, method), line in newest.items() if model == name}
        last = list(own.values())[-1]
        where = (
            f"Commit {last['commit']}, {last['processor']}, load average "
            f"{last['load_average']:.1f} at the start."
        )
        text += [f"## {name}", "", where, "", *_table(own), ""]
    return text[:-1]


def _targets(newest: dict[tuple[str, str], Record], names: Sequence[str]) -> list[str]:
    framed = [line for (_, method), line in newest.items() if method.startswith("frames")]
    rows = [
        all_row("bits of losses, gradients and buffers equal eager's",
                sum(line["is_bitwise"] for line in framed), len(framed)),
        worst_row("measured peak over the budget or the smallest peak", OVER_BUDGET,
                  [(_place(line), line["peak_bytes"] / _allowed(line)) for line in framed]),
    ]  # fmt: skip
    for share, reach in TIME_AT.items():
        lines = [newest[name, f"frames: {share}"] for name in names]
        within = [line for line in lines if line["minimum_bytes"] <= line["budget_bytes"]]
        figures = [(line["model"], line["ratio"]) for line in within]
        rows.append(worst_row(f"time at {share} of the peak", reach, figures))
    at_equal_peak = [
        (name, newest[name, "frames: as checkpoint"]["ratio"] / newest[name, "checkpoint"]["ratio"])
        for name in names
    ]
    rows.append(worst_row("time over checkpoints' at their peak", 1.0, at_equal_peak))
    beside_plans = [
        (_place(line), newest[name, method.replace("plan", "frames")]["ratio"] / line["ratio"])
        for (name, method), line in newest.items()
        if method.startswith("plan")
    ]
    rows.append(worst_row("time over a plan's", TIME_OVER_PLAN, beside_plans))
    return targets(rows)


def _place(line: Record) -> str:
    return f"{line['model']}, {line['method']}"


def _allowed(line: Record) -> int:
    return max(line["budget_bytes"], line["minimum_bytes"])


def _table(own: dict[str, Record]) -> list[str]:
    eager_s = own["eager"]["seconds"]
    columns = (
        ("method", "{method}"),
        ("budget", _budget_text),
        ("peak", lambda line: f"{line['peak_bytes'] / line['eager_bytes']:.3f}"),
        ("time", "{ratio:.3f}x"),
        (
            "bound",
            lambda line: "" if (s := line.get("bound_s")) is None else f"{1 + s / eager_s:.3f}x",
        ),
        (
            "made again",
            lambda line: (
                "{num_recomputed} of {num_frames}".format_map(line) if "num_frames" in line else ""
            ),
        ),
        ("bits", lambda line: "equal" if line["is_bitwise"] else "**differ**"),
    )
    return records_table(columns, own.values())


def _budget_text(line: Record) -> str:
    if line["budget_bytes"] is None:
        return ""
    share = f"{line['budget_bytes'] / line['eager_bytes']:.2f}"
    if line.get("minimum_bytes", 0) > line["budget_bytes"]:
        share += f" (smallest peak: {line['minimum_bytes'] / line['eager_bytes']:.2f})"
    return share


if __name__ == "__main__":
    sys.exit(main())
