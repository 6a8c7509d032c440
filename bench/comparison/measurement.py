"""One model's measurement in one process: peaks first, then times in turn.

The process starts with `measure.RESIDENT_ENVIRONMENT` and goes through four stages:

1. It measures every peer's peak with both meters.
2. A second process plans for the budgets of the sweep and for each peer's measured peak
   (`bench.comparison.plans`). Op times are measured there, with the ordinary allocator.
3. It measures the peaks of those plans.
4. It returns to ordinary allocation and times all methods in turn.

"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench import command, measure, peers
from bench.command import Record, say
from bench.comparison.plans import plan_model, workload_of
from bench.machine import machine_record
from rockmate.curves.measure import tensor_difference
from rockmate.entry.module import RockmateModule
from rockmate.graph.step_options import StepOptions
from rockmate.plan.plan import Plan
from rockmate.planning.step import capture_step

_BETWEEN_EAGER = 4
"""Number of methods that are timed between two eager steps."""


class ModelMeasurement(measure.Trainer):
    """One model's measurements."""

    def __init__(self, name: str, options: Record) -> None:
        """Builds the model and takes eager's gradients."""
        super().__init__(workload_of(name, options))
        self._name, self._options = name, options
        self._points: list[Record] = []
        # The first step allocates library buffers and `.grad`.
        self.step(self.workload.model)()
        self._gradients = self.gradients(self.workload.model)
        self._lent: dict[str, peers.Peer] = {}

    def records(self) -> Iterator[Record]:
        """All that is measured."""
        machine = machine_record("bench.comparison.measurement")
        yield {"kind": "run", **machine, "options": self._options}
        yield from self._peers()
        with tempfile.TemporaryDirectory() as folder:
            yield from self._ours(Path(folder))
        measure.ordinary_allocation()
        yield from self._times()

    def _peers(self) -> Iterator[Record]:
        found = peers.peers_for()
        if self.workload.stages is not None:
            found[peers.STAGES] = peers.checkpoint_stages
        chosen = self._options["method"]
        for name, peer in found.items():
            if not chosen or name in ("eager", *chosen):
                yield self._measured(name, peer, owner="peer")

    def _ours(self, folder: Path) -> Iterator[Record]:
        planned = self._planned(folder)
        options = StepOptions(outputs="loss" if self._options["loss_only"] else "all")
        step = capture_step(self.workload.model, self.workload.sample, options)
        for record in planned:
            yield record
            if record["kind"] != "plan":
                continue
            begin = time.perf_counter()
            plan = Plan.load(folder / record["file"])
            call = step.with_chunks_of(plan.options).planned_call(plan)
            module = RockmateModule.of(self.workload.model, call, trial="never")
            prepare_s = record["plan_s"] + time.perf_counter() - begin
            peer: peers.Peer = lambda _, module=module: nullcontext(module)  # noqa: E731
            yield self._measured(record["method"], peer, owner="ours", prepare_s=prepare_s)

    def _planned(self, folder: Path) -> list[Record]:
        """The records of the second process."""
        say(f"{self._name}: planning")
        peaks = [point["peak_bytes"] for point in self._points]
        plain = {name: value for name, value in os.environ.items() if name[:7] != "MALLOC_"}
        given = (self._name, self._options, str(folder), peaks)
        status, records = command.apart(plan_model, *given, environment=plain)
        if status:
            raise RuntimeError(f"planning {self._name} ended with status {status}")
        return records

    def _measured(
        self, name: str, peer: peers.Peer, *, owner: str, prepare_s: float = 0.0
    ) -> Record:
        """The point of a method, or its failure; a point is timed unless another stands for it."""
        say(f"{self._name}: peak of {name}")
        common = {"method": name, "owner": owner}
        try:
            point = {"kind": "point", **common, **self._point(name, peer, owner, prepare_s)}
        # A peer that fails is shown with its error, of whatever kind that is.
        except Exception as error:  # noqa: BLE001
            return {"kind": "failed", **common, "error": _text_of(error)}
        self._points.append(point)
        if point["same_as"] is None:
            self._lent[name] = peer
        return point

    def _point(self, name: str, peer: peers.Peer, owner: str, prepare_s: float) -> Record:
        self.zero()
        with peer(self.workload) as model:
            step = self.step(model)
            first_ms = measure.time_once(step)
            own = measure.gradients_of(self.workload.model)
            difference = tensor_difference(own, self._gradients)
            second_ms = measure.time_once(step)
            peak_bytes = measure.allocator_peak(step)
            found = {
                "family": peers.family(name),
                "peak_bytes": peak_bytes,
                "gradients": asdict(difference),
                "prepare_s": prepare_s + max(0.0, first_ms - second_ms) / 1e3,
            }
            same_as = self._same_as(found) if owner == "peer" else None
            resident_bytes = None if same_as else measure.resident_peak(step)
        return found | {"same_as": same_as, "resident_bytes": resident_bytes}

    def _same_as(self, point: Record) -> str | None:
        """A measured peer of the same family, with the same peak and gradients; None if none.

        It stands for an equal choice of the partitioner.
        """

        def what(own: Record) -> tuple[str, int, float]:
            return own["family"], own["peak_bytes"], own["gradients"]["largest_relative"]

        alike = (p["method"] for p in self._points if not p["same_as"] and what(p) == what(point))
        return next(alike, None)

    def _times(self) -> Iterator[Record]:
        """Every method's times in turn.

        A time is compared with the mean of the eager times before and after it, since the machine's
        speed drifts during a round.
        """
        rounds = self._options["rounds"]
        say(f"{self._name}: timing {len(self._lent)} methods, {rounds} rounds")
        steps = {name: partial(self.lent_step, peer) for name, peer in self._lent.items()}
        times = measure.time_in_turn(
            steps, rounds, before=self.zero, reference_every=_BETWEEN_EAGER
        )
        for name, own in times.items():
            pairs = zip(own.times_ms, own.reference_ms, strict=True)
            for number, (ms, eager_ms) in enumerate(pairs):
                record = {"kind": "time", "method": name, "round": number, "ms": ms}
                yield record | {"eager_ms": eager_ms}


def _text_of(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]


def measure_model(name: str, options: Record) -> Iterator[Record]:
    """The records of one model, in this process, which started as said above."""
    for record in ModelMeasurement(name, options).records():
        yield {"kind": record["kind"], "model": name, **record}
