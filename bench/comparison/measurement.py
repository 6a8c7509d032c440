"""One model's measurement in one process: peaks first, then times in turn.

The process starts with `measure.RESIDENT_ENVIRONMENT` and goes through four stages:

1. It measures every peer's peak with both meters.
2. A second process plans for the budgets of the sweep and for each peer's measured peak
   (`bench.comparison.plans`). Op times are measured there, with the ordinary allocator.
3. It measures the peaks of those plans.
4. It returns to ordinary allocation and times all methods in turn.

Plans wait in their directory while a measurement is interrupted.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from bench import measure, models, peers
from bench.command import Record, read, say
from bench.comparison.lines import Lines
from bench.comparison.process import Task
from bench.comparison.result import OURS
from bench.machine import machine_record
from rockmate import STRATEGIES
from rockmate.curves.measure import tensor_difference
from rockmate.graph.step_options import StepOptions
from rockmate.module import RockmateModule
from rockmate.plan.plan import Plan
from rockmate.step import capture_step

_BETWEEN_EAGER = 4
"""Number of methods that are timed between two eager steps."""


class ModelMeasurement:
    """One model's measurements."""

    def __init__(self, task: Task) -> None:
        """Builds the model and takes eager's gradients."""
        self.options = task
        self.lines = Lines(task.lines, task.model)
        self.workload = task.workload()
        self._batch = self.workload.make_batch(1)
        # The first step allocates library buffers and `.grad`.
        self._step(self.workload.model)
        self._zero()
        self._step(self.workload.model)
        self._gradients = measure.gradients_of(self.workload.model)

    def measure(self) -> None:
        """Measures everything that is not in the file."""
        self.lines.add(
            "run",
            **machine_record("bench.comparison.measurement"),
            options=self.options.measured,
        )
        lent = self._measure_peers()
        lent |= self._measure_ours()
        if torch.device(self.options.device).type == "cpu":
            measure.ordinary_allocation()
        self._time(lent)
        self.lines.add("finished", options=self.options.measured)

    def _measure_peers(self) -> dict[str, peers.Peer]:
        found = peers.peers_for(torch.device(self.options.device).type, quick=self.options.quick)
        if self.workload.stages is not None:
            found[peers.STAGES] = peers.checkpoint_stages
        lent: dict[str, peers.Peer] = {}
        for name, peer in found.items():
            if not self._is_wanted(name):
                continue
            if peer is None:
                self._once("skipped", name, why="runs on CUDA only")
            elif self._measure(name, peer, owner="peer"):
                lent[name] = peer
        return lent

    def _measure_ours(self) -> dict[str, peers.Peer]:
        if self.options.peers_only:
            return {}
        if not self._is_planned():
            self._plan()
        plans = self._plans()
        options = StepOptions(**self.options.capture)
        step = capture_step(self.workload.model, self.workload.sample, options)
        lent: dict[str, peers.Peer] = {}
        for record in plans:
            name, kind = record["method"], record["kind"]
            self._once(kind, name, **_without(record, "kind", "method", "model"))
            if kind != "plan":
                continue
            begin = time.perf_counter()
            plan = Plan.load(self.options.plans / record["file"])
            call = step.with_chunks_of(plan.options).planned_call(plan)
            module = RockmateModule.of(self.workload.model, call, trial="never")
            prepare_s = record["plan_s"] + time.perf_counter() - begin
            peer = partial(_lend, module)
            if self._measure(name, peer, owner="ours", prepare_s=prepare_s):
                lent[name] = peer
        return lent

    def _is_planned(self) -> bool:
        """Whether an interrupted run has planned for the present points and methods."""
        listing = read(self.options.plans / "plans.jsonl")
        asked = {name for name in self.options.method if name.partition(": ")[0] in STRATEGIES}
        is_for_points = any(
            record["kind"] == "planner" and record["num_peer_points"] == self._num_peer_points()
            for record in listing
        )
        return is_for_points and asked <= {record.get("method") for record in listing}

    def _num_peer_points(self) -> int:
        return sum(record["owner"] == "peer" for record in self.lines.of("point"))

    def _plan(self) -> None:
        say(f"{self.options.model}: planning")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
        }
        status = self.options.run("plans", environment)
        if status:
            raise RuntimeError(f"{self.options.model}: planning ended with status {status}")

    def _plans(self) -> list[Record]:
        """The wanted records of the second process."""
        records = read(self.options.plans / "plans.jsonl")
        if not self.lines.of("planner"):
            planner = next(record for record in records if record["kind"] == "planner")
            self.lines.add("planner", **_without(planner, "kind", "model"))
        return [
            record
            for record in records
            if record["kind"] != "planner" and self._is_wanted(record["method"])
        ]

    def _measure(self, name: str, peer: peers.Peer, *, owner: str, prepare_s: float = 0.0) -> bool:
        """Measures the method if it has no point; returns whether it is to be timed."""
        known = [record for record in self.lines.of("point", "failed") if record["method"] == name]
        if not known:
            say(f"{self.options.model}: peak of {name}")
            try:
                point = self._point(name, peer, owner, prepare_s)
                known = [self.lines.add("point", method=name, owner=owner, **point)]
            # A peer that fails is shown with its error, of whatever kind that is.
            except Exception as error:  # noqa: BLE001
                known = [self.lines.add("failed", method=name, owner=owner, error=_text_of(error))]
        return known[0]["kind"] == "point" and known[0]["same_as"] is None

    def _point(self, name: str, peer: peers.Peer, owner: str, prepare_s: float) -> Record:
        self._zero()
        with peer(self.workload) as model:
            first_ms = measure.time_once(partial(self._step, model), self.options.device)
            difference = tensor_difference(
                measure.gradients_of(self.workload.model), self._gradients
            )
            second_ms = measure.time_once(partial(self._step, model), self.options.device)
            peak_bytes = measure.allocator_peak(
                partial(self._step, model), device=self.options.device
            )
            same_as = self._same_as(name, owner, peak_bytes, difference.largest_relative)
            has_resident = torch.device(self.options.device).type == "cpu" and same_as is None
            resident_bytes = (
                measure.resident_peak(partial(self._step, model)) if has_resident else None
            )
        return {
            "family": peers.family(name),
            "peak_bytes": peak_bytes,
            "resident_bytes": resident_bytes,
            "gradients": asdict(difference),
            "prepare_s": prepare_s + max(0.0, first_ms - second_ms) / 1e3,
            "same_as": same_as,
        }

    def _same_as(self, name: str, owner: str, peak_bytes: int, difference: float) -> str | None:
        """A measured peer of the same family, with the same peak and gradients; None if none.

        It stands for an equal choice of the partitioner.
        """
        for other in self.lines.of("point"):
            is_alike = (
                other["owner"] == owner == "peer"
                and other["family"] == peers.family(name)
                and other["same_as"] is None
            )
            if is_alike and (other["peak_bytes"], other["gradients"]["largest_relative"]) == (
                peak_bytes,
                difference,
            ):
                return other["method"]
        return None

    def _time(self, lent: Mapping[str, peers.Peer]) -> None:
        """Times every method that has too few times, in turn, after one warm-up round.

        A time is compared with the mean of the eager times before and after it, since the machine's
        speed drifts during a round.
        """
        wanted = self.options.rounds
        counts = {
            name: sum(record["method"] == name for record in self.lines.of("time")) for name in lent
        }
        left = {
            name: peer for name, peer in lent.items() if name != "eager" and counts[name] < wanted
        }
        if not left and counts.get("eager", 0) >= wanted:
            return
        start = max((record["round"] + 1 for record in self.lines.of("time")), default=0)
        num_rounds = max([wanted - counts[name] for name in left], default=wanted)
        methods = f"{len(left)} methods and eager in turn"
        say(f"{self.options.model}: timing {methods}, {num_rounds} rounds")
        with measure.quiet():
            for number in range(start - 1, start + num_rounds):
                self._time_round(left, number if number >= start else None)

    def _time_round(self, lent: Mapping[str, peers.Peer], number: int | None) -> None:
        """Times every method and eager; a warm-up round has no number and no records."""
        eager_ms = [self._time_once(peers.eager)]
        names = list(lent)
        for first in range(0, len(names), _BETWEEN_EAGER):
            own_ms = {
                name: self._time_once(lent[name]) for name in names[first : first + _BETWEEN_EAGER]
            }
            eager_ms.append(self._time_once(peers.eager))
            for name, elapsed_ms in own_ms.items():
                self._record_time(name, number, elapsed_ms, statistics.mean(eager_ms[-2:]))
        median_ms = statistics.median(eager_ms)
        self._record_time("eager", number, median_ms, median_ms)

    def _record_time(
        self, name: str, number: int | None, elapsed_ms: float, eager_ms: float
    ) -> None:
        if number is not None:
            self.lines.add("time", method=name, round=number, ms=elapsed_ms, eager_ms=eager_ms)

    def _time_once(self, peer: peers.Peer) -> float:
        gc.collect()
        self._zero()
        with peer(self.workload) as model:
            return measure.time_once(partial(self._step, model), self.options.device)

    def _step(self, model: Callable[..., Any]) -> object:
        return measure.training_step(self.workload, model, self._batch, seed=1)

    def _zero(self) -> None:
        self.workload.model.zero_grad(set_to_none=False)

    def _is_wanted(self, name: str) -> bool:
        """Whether a method was asked for; plans at the peaks of peers always are."""
        chosen = self.options.method
        return not chosen or name == "eager" or name in chosen or name.startswith(f"{OURS}: at ")

    def _once(self, kind: str, name: str, **fields: Any) -> None:
        if not any(record["method"] == name for record in self.lines.of(kind)):
            self.lines.add(kind, method=name, **fields)


def _without(record: Record, *names: str) -> Record:
    return {name: value for name, value in record.items() if name not in names}


def _lend(module: nn.Module, _: models.Workload) -> AbstractContextManager[nn.Module]:
    return nullcontext(module)


def _text_of(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]


def main() -> int:
    """Measures one model; 130 if interrupted."""
    torch.set_num_threads(1)
    try:
        ModelMeasurement(Task.from_command_line()).measure()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
