"""All methods on one model, in one process run: peaks as they are taken, then times in turn, each as one line of JSON.

    python -m bench.comparison --model llama --lines STEM.jsonl --plans DIRECTORY

which `bench.compare` starts for each model. The process begins with `measure.RESIDENT_ENVIRONMENT`, measures every peer's peak by both
meters, has a second process plan for the budgets of the sweep and for each peer's measured peak (`bench.comparison_plans`: op times are
measured there, with the ordinary allocator), measures those plans' peaks, goes back to ordinary allocation, and times everything in
turn. What is in the file already is not measured again; plans wait in their directory for that. Lines by kind:

* `run`: machine, versions, options of one start;
* `point`: a method's peaks, its gradients against eager's, seconds that its first step took beyond an ordinary one;
* `plan`: what one of our points was planned for and promised; `planner`: what the planner spent;
* `failed`, `skipped`, `infeasible`: a method without a point, and why;
* `time`: one step of one method, and the mean of eager's steps before and after it;
* `finished`: nothing is left to do for this model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import measure, models, peers
from bench.machine import machine_record
from rockmate import STRATEGIES
from rockmate.module import RockmateModule
from rockmate.plan.plan import Plan
from rockmate.step import capture_step

Record = dict[str, Any]

_BETWEEN_EAGER = 4  # methods that are timed between two of eager's steps


class Lines:
    """A file of JSON lines that grows with every measurement; only one model's are looked at."""

    def __init__(self, path: Path, model: str) -> None:
        """Reads what is there already."""
        self._path = path
        self._model = model
        self.records = [record for record in read(path) if record["model"] == model]

    def add(self, kind: str, **fields: Any) -> Record:
        """Writes one record to the end of the file at once."""
        record = {"kind": kind, "model": self._model, **fields}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        return record

    def of(self, *kinds: str) -> list[Record]:
        """Records of these kinds, in the order in which they were written."""
        return [record for record in self.records if record["kind"] in kinds]


def read(path: Path) -> list[Record]:
    """The records of a file, none where there is no file; a last line that was cut off by an interruption is left out.

    Raises:
        ValueError: another line is no JSON.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                path.write_text("".join(f"{whole}\n" for whole in lines[:-1]))
                break
            msg = f"{path}, line {number} is no JSON: {error}. Remove the line, or write to another file."
            raise ValueError(msg) from error
    return records


class Comparison:
    """One model's measurements."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Builds the model and takes eager's gradients."""
        self.options = options
        self.lines = Lines(options.lines, options.model)
        self.workload = models.build(
            options.model, tiny=options.tiny, device=options.device
        ).with_loss_inside()
        self._batch = self.workload.make_batch(1)
        self._step(self.workload.model)  # makes library buffers and `.grad`
        self._zero()
        self._step(self.workload.model)
        self._gradients = measure.gradients_of(self.workload.model)

    def measure(self) -> None:
        """Everything that is not in the file yet."""
        self.lines.add("run", **machine_record("bench.comparison"), options=plain(self.options))
        lent = self._measure_peers()
        lent |= self._measure_ours()
        if torch.device(self.options.device).type == "cpu":
            measure.ordinary_allocation()
        self._time(lent)
        self.lines.add("finished", options=plain(self.options))

    # --- peaks ---------------------------------------------------------------------------------------------

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
        step = capture_step(self.workload.model, self.workload.sample)
        lent: dict[str, peers.Peer] = {}
        for record in plans:
            name, kind = record["method"], record["kind"]
            self._once(
                kind,
                name,
                **{
                    key: value
                    for key, value in record.items()
                    if key not in ("kind", "method", "model")
                },
            )
            if kind != "plan":
                continue
            begin = time.perf_counter()
            plan = Plan.load(self.options.plans / record["file"])
            module = RockmateModule.of(
                self.workload.model, step.in_form_of(plan).planned_call(plan)
            )
            prepare_s = record["plan_s"] + time.perf_counter() - begin
            peer = partial(_lend, module)
            if self._measure(name, peer, owner="ours", prepare_s=prepare_s):
                lent[name] = peer
        return lent

    def _is_planned(self) -> bool:
        """Whether an earlier run, which was interrupted, planned for the very points that there are and what is asked for."""
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
        command = [sys.executable, "-m", "bench.comparison_plans", *_arguments(self.options)]
        surroundings = {
            name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
        }
        subprocess.run(
            command, env=surroundings, cwd=Path(__file__).resolve().parent.parent, check=True
        )

    def _plans(self) -> list[Record]:
        """What the second process planned and was asked for."""
        records = read(self.options.plans / "plans.jsonl")
        if not self.lines.of("planner"):
            planner = next(record for record in records if record["kind"] == "planner")
            self.lines.add(
                "planner",
                **{key: value for key, value in planner.items() if key not in ("kind", "model")},
            )
        return [
            record
            for record in records
            if record["kind"] != "planner" and self._is_wanted(record["method"])
        ]

    def _measure(self, name: str, peer: peers.Peer, *, owner: str, prepare_s: float = 0.0) -> bool:
        """Whether the method has a point that is to be timed; measures it if there is none."""
        known = [record for record in self.lines.of("point", "failed") if record["method"] == name]
        if not known:
            say(f"{self.options.model}: peak of {name}")
            try:
                known = [
                    self.lines.add(
                        "point",
                        method=name,
                        owner=owner,
                        **self._point(name, peer, owner, prepare_s),
                    )
                ]
            except Exception as error:  # noqa: BLE001 (a peer that fails is shown with its error, whatever that is)
                known = [self.lines.add("failed", method=name, owner=owner, error=_text_of(error))]
        return known[0]["kind"] == "point" and known[0]["same_as"] is None

    def _point(self, name: str, peer: peers.Peer, owner: str, prepare_s: float) -> Record:
        self._zero()
        with peer(self.workload) as model:
            first_ms = measure.time_once(partial(self._step, model), self.options.device)
            difference = measure.tensor_difference(
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
        """A peer of the same family with the same peak to the byte and the same gradients: the partitioner chose the same again."""
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

    # --- times ---------------------------------------------------------------------------------------------

    def _time(self, lent: Mapping[str, peers.Peer]) -> None:
        """Rounds of every method that has too few times, in turn, with eager between each few of them; the first is not counted.

        A time is held against the mean of eager's before and after it, since a machine drifts while a round takes its minute.
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
        say(
            f"{self.options.model}: timing {len(left)} methods and eager in turn, {num_rounds} rounds"
        )
        with measure.quiet():
            for number in range(start - 1, start + num_rounds):
                self._time_round(left, number if number >= start else None)

    def _time_round(self, lent: Mapping[str, peers.Peer], number: int | None) -> None:
        """Times every method and eager; written down with the number of the round, if it has one."""
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

    # --- small things --------------------------------------------------------------------------------------

    def _step(self, model: Callable[..., Any]) -> object:
        return measure.training_step(self.workload, model, self._batch, seed=1)

    def _zero(self) -> None:
        self.workload.model.zero_grad(set_to_none=False)

    def _is_wanted(self, name: str) -> bool:
        """Whether a method was asked for; plans for the peaks of peers that were go with them."""
        chosen = self.options.method
        return not chosen or name == "eager" or name in chosen or name.startswith("rockmate: at ")

    def _once(self, kind: str, name: str, **fields: Any) -> None:
        if not any(record["method"] == name for record in self.lines.of(kind)):
            self.lines.add(kind, method=name, **fields)


def _lend(module: nn.Module, _: models.Workload) -> AbstractContextManager[nn.Module]:
    return nullcontext(module)


def _text_of(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]


def plain(options: argparse.Namespace) -> Record:
    """The options that decide what is measured, as JSON has them."""
    return {
        key: value
        for key, value in vars(options).items()
        if not isinstance(value, Path) and key != "model"
    }


# --- command line ---------------------------------------------------------------------------------------


def parser(program: str) -> argparse.ArgumentParser:
    """Options of one model's processes."""
    made = argparse.ArgumentParser(prog=program)
    made.add_argument("--model", required=True, choices=sorted(models.REGISTRY))
    made.add_argument(
        "--lines", required=True, type=Path, metavar="JSONL", help="where lines are added"
    )
    made.add_argument(
        "--plans", required=True, type=Path, metavar="DIRECTORY", help="where plans wait"
    )
    made.add_argument("--device", default="cpu")
    made.add_argument(
        "--rounds", type=int, default=3, help="timed rounds, after one that is not counted"
    )
    made.add_argument("--method", action="append", default=[], help="repeatable; all if left out")
    made.add_argument("--quick", action="store_true", help="fewer settings")
    made.add_argument("--tiny", action="store_true", help="the variant that takes milliseconds")
    made.add_argument("--peers-only", action="store_true", help="plan nothing")
    return made


def _arguments(options: argparse.Namespace) -> list[str]:
    """The command line of these options."""
    words = [
        "--model",
        options.model,
        "--lines",
        str(options.lines),
        "--plans",
        str(options.plans),
        "--device",
        options.device,
    ]
    words += [
        "--rounds",
        str(options.rounds),
        *(word for name in options.method for word in ("--method", name)),
    ]
    return [
        *words,
        *["--quick"] * options.quick,
        *["--tiny"] * options.tiny,
        *["--peers-only"] * options.peers_only,
    ]


def start(options: argparse.Namespace) -> int:
    """Measures one model in a process of its own; its exit status."""
    command = [sys.executable, "-m", "bench.comparison", *_arguments(options)]
    root = Path(__file__).resolve().parent.parent
    return subprocess.run(
        command, env=os.environ | measure.RESIDENT_ENVIRONMENT, cwd=root, check=False
    ).returncode


def say(message: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(f"bench: {message}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one model; 130 if interrupted."""
    options = parser("bench.comparison").parse_args(arguments)
    torch.set_num_threads(1)
    try:
        Comparison(options).measure()
    except KeyboardInterrupt:
        return 130
    return 0


def by_model(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by model, in the order of their first lines."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["model"], []).append(record)
    return found


if __name__ == "__main__":
    sys.exit(main())
