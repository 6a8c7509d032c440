"""Frames beside eager, checkpoints and plans: models without one graph, and two controls.

    python -m bench.frames                       # all; bench/results/frames_cpu_<yyyymm>.*
    python -m bench.frames --model detector --output /tmp/frames
    python -m bench.frames --read                # only the page

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
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from bench.comparison.lines import read
from bench.frames_page import SHARES, page
from bench.machine import machine_record
from bench.measure import allocator_peak
from bench.models import dynamic
from bench.peers.checkpoint import replaced_forwards
from rockmate import RockmateModule

Record = dict[str, Any]
SEEDS = (0, 1, 2)
RESULTS = Path(__file__).parent / "results"


class Trained:
    """A copy of a model, and how its steps are run."""

    def __init__(self, made: dynamic.Dynamic, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self._model = copy.deepcopy(made.model)
        self.module = wrap(self._model)
        self._make_batch = made.make_batch
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

    def seconds(self, seed: int) -> float:
        """Of one step, with gradients in place."""
        begin = time.process_time()
        self.step(seed)
        return time.process_time() - begin


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes the page."""
    options = _parse(arguments)
    lines = Path(f"{options.output}.jsonl")
    if not options.read:
        torch.set_num_threads(1)
        for name in tqdm(options.model, unit="model"):
            _measure(name, options, lines)
    text = "\n".join(page(read(lines))) + "\n"
    Path(f"{options.output}.md").write_text(text)
    sys.stdout.write(text)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.frames", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", action="append", choices=dynamic.NAMES, help="repeatable; default: all")
    add("--rounds", type=int, default=7, help="timed rounds")
    add("--tiny", action="store_true", help="models for tests, steps of milliseconds")
    add("--output", type=Path, metavar="STEM", help="write STEM.jsonl and STEM.md")
    add("--read", action="store_true", help="measure nothing: write the page again")
    options = parser.parse_args(arguments)
    if options.output is None and (options.model or options.tiny):
        parser.error("--output STEM is needed for some of the models, or tiny ones")
    if options.output is None:
        options.output = RESULTS / f"frames_cpu_{time.strftime('%Y%m')}"
    options.model = options.model or dynamic.NAMES
    return options


def _measure(name: str, options: argparse.Namespace, lines: Path) -> None:
    """All methods on one model, appended to the lines."""
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
    head = machine_record("bench.frames")
    records: dict[str, Record] = {}
    for method, (trained, budget) in methods.items():
        pairs = zip(trained.first_numbers, eager.first_numbers, strict=True)
        same = [torch.equal(one, other) for one, other in pairs]
        records[method] = {
            **head, "model": name, "method": method, "budget_bytes": budget,
            "is_bitwise": all(same), "peak_bytes": trained.peak_bytes(),
            "eager_bytes": eager_bytes,
        } | _frames_record(trained)  # fmt: skip
    for method, ratios in _ratios(methods, options.rounds).items():
        records[method] |= ratios
    with lines.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records.values())


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


def _ratios(methods: dict[str, tuple[Trained, int | None]], rounds: int) -> dict[str, Record]:
    """Of each method, the median of its time over eager's of the round."""
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for number in range(rounds):
        order = list(methods)
        for method in order if number % 2 else reversed(order):
            seconds[method].append(methods[method][0].seconds(SEEDS[number % len(SEEDS)]))
    return {
        method: {
            "seconds": statistics.median(own),
            "ratio": statistics.median(
                one / other for one, other in zip(own, seconds["eager"], strict=True)
            ),
        }
        for method, own in seconds.items()
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


if __name__ == "__main__":
    sys.exit(main())
