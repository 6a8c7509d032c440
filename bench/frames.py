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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bench import command
from bench.command import Record
from bench.machine import machine_text
from bench.measure import allocator_peak, time_in_turn
from bench.models import Workload, dynamic
from bench.pages import Goal, filled, judged, records_table, targets, worst_row
from bench.peers.checkpoint import checkpointed
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

    def __init__(self, made: Workload, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self._model = copy.deepcopy(made.model)
        self.module = wrap(self._model)
        self._make_batch, self._num_timed = made.make_batch, 0
        self.first_numbers = self._numbers()

    def step(self, seed: int) -> Tensor:
        """Forward and backward; gradients add up."""
        return self._step(seed, self._make_batch(seed))

    def _step(self, seed: int, batch: Mapping[str, Tensor]) -> Tensor:
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


def measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
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
    yield from records.values()


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
        with checkpointed(map(self.model.get_submodule, self.paths)):
            return self.model(**batch)


# --- page -------------------------------------------------------------------------------------


def page(lines: Sequence[Record]) -> list[str]:
    """Targets, and a table for each model."""
    newest = {(line["model"], line["method"]): line for line in lines}
    names = list(dict.fromkeys(name for name, _ in newest))
    text: list[str] = []
    for name in names:
        own = {method: line for (model, method), line in newest.items() if model == name}
        last = list(own.values())[-1]
        where = (
            f"Commit {last['commit']}, {last['processor']}, load average "
            f"{last['load_average']:.1f} at the start."
        )
        text += [f"## {name}", "", where, "", *_table(own), ""]
    machine = machine_text(lines[-1])
    return filled("frames", machine=machine, targets=_targets(newest, names), models=text)


def _targets(newest: dict[tuple[str, str], Record], names: Sequence[str]) -> list[str]:
    at_equal_peak = [
        (name, newest[name, "frames: as checkpoint"]["ratio"] / newest[name, "checkpoint"]["ratio"])
        for name in names
    ]
    beside_plans = [
        (_PLACE.format_map(line), newest[key[0], f"frames{key[1][4:]}"]["ratio"] / line["ratio"])
        for key, line in newest.items()
        if key[1].startswith("plan")
    ]
    return targets(
        [
            *judged(_GOALS, list(newest.values())),
            worst_row("time over checkpoints' at their peak", 1.0, at_equal_peak),
            worst_row("time over a plan's", TIME_OVER_PLAN, beside_plans),
        ]
    )


def _is_framed(line: Record) -> bool:
    return line["method"].startswith("frames")


def _fits_at(share: float) -> Callable[[Record], bool]:
    """Whether frames keep a budget of this share."""
    return lambda line: (
        line["method"] == f"frames: {share}" and line["minimum_bytes"] <= line["budget_bytes"]
    )


def _allowed(line: Record) -> int:
    return max(line["budget_bytes"], line["minimum_bytes"])


_PLACE = "{model}, {method}"
_GOALS = (
    Goal("bits of losses, gradients and buffers equal eager's", None,
         lambda line: line["is_bitwise"], _is_framed),
    Goal("measured peak over the budget or the smallest peak", OVER_BUDGET,
         lambda line: line["peak_bytes"] / _allowed(line), _is_framed, _PLACE),
    *(
        Goal(f"time at {share} of the peak", reach, lambda line: line["ratio"], _fits_at(share),
             "{model}")
        for share, reach in TIME_AT.items()
    ),
)  # fmt: skip


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the page."""
    return command.run_models(
        "frames", __doc__, arguments, measured, page, models=dynamic.NAMES, rounds=7, tiny=True,
        stem="frames_cpu",
    )[0]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
