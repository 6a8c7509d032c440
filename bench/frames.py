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
from bench.pages import filled
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
    """Targets, and a table for each model, in the order of their first lines."""
    newest = {(line["model"], line["method"]): line for line in lines}
    found = [{**line, "own_ratio": _own_ratio(newest, line)} for line in newest.values()]
    return filled(
        "frames",
        machine=machine_text(lines[-1]),
        lines=found,
        names=dict.fromkeys(line["model"] for line in found),
        over_budget=OVER_BUDGET,
        time_at=TIME_AT,
        time_over_plan=TIME_OVER_PLAN,
    )


def _own_ratio(newest: dict[tuple[str, str], Record], line: Record) -> float | None:
    """The ratio of the frames beside a plan or beside checkpoints."""
    kind, colon, share = line["method"].partition(":")
    method = "frames: as checkpoint" if kind == "checkpoint" else f"frames{colon}{share}"
    return newest.get((line["model"], method), {}).get("ratio")


main = command.main_of(
    "frames", __doc__, measured, page, models=dynamic.NAMES, rounds=7, tiny=True,
    stem="frames_cpu",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
