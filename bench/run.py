"""One model at some budgets: peaks, times and equality with eager, as one JSON line a budget.

    python -m bench.run --model gpt2-deep --budget 0.5 --budget minimum --checkpoint

JSON goes to stdout, progress to stderr. One planner serves all budgets. Eager, the peers and every
budget are timed in turn in this process on one thread. Resident peaks come from a second process,
since the allocator settings that they need would slow down the timed steps. It plans for the same
budgets in bytes, with op times of its own, so its plans may differ. An infeasible budget gives a
line with `feasible` false.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench import measure, models, peers
from bench.machine import machine_record

if TYPE_CHECKING:
    from rockmate import Planner

NUM_EQUALITY_STEPS = 3
PREDICTION_TOLERANCE = 0.02

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 unless something raised."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    if options.resident:
        _write_line(_resident_peaks(options))
        return 0
    for record in run(options):
        _write_line(record)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", required=True, choices=sorted(models.REGISTRY))
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        help="fraction of the peak, bytes, '1GiB', 'minimum' or 'checkpoint'; repeatable",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="timed rounds, after one warm-up round"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="the model for tests")
    parser.add_argument(
        "--checkpoint", action="store_true", help="measure one checkpoint per layer as well"
    )
    parser.add_argument("--no-resident", action="store_true", help="measure no resident peaks")
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.checkpoint = options.checkpoint or "checkpoint" in options.budget
    return options


def run(options: argparse.Namespace) -> Iterator[Record]:
    """The records of all budgets, or one record without a budget where none was asked for."""
    workload = models.build(
        options.model, tiny=options.tiny, device=options.device, seed=options.seed
    )
    names = ["eager", "checkpoint"] if options.checkpoint else ["eager"]
    steps = {name: _peer_step(workload, peers.PEERS[name]) for name in names}
    _say("measuring the peaks of " + " and ".join(names))
    peaks = {name: _peak(workload, step, options.device) for name, step in steps.items()}

    planned = _plan_all(workload, options, peaks.get("checkpoint")) if options.budget else None
    candidates = planned.candidates if planned else []
    for candidate in candidates:
        if candidate.step is not None:
            _say(f"measuring the peak at budget {candidate.given}")
            steps[candidate.key] = candidate.step
            peaks[candidate.key] = _peak(workload, candidate.step, options.device)

    _say(f"timing {len(steps)} steps in turn, {options.rounds} rounds")
    zero = partial(workload.model.zero_grad, set_to_none=False)
    times = measure.time_in_turn(steps, options.rounds, before=zero, device=options.device)
    resident = _resident_in_child(options, [c for c in candidates if c.step is not None])

    common = machine_record("bench.run") | {
        "model": options.model,
        "tiny": options.tiny,
        "device": options.device,
        "seed": options.seed,
        "rounds": options.rounds,
        "resident_calibration": resident.get("calibration"),
    }
    for name in names:
        common |= _peer_record(name, peaks[name], resident.get(name), times[name])
    if planned is None:
        yield common
        return
    common |= planned.record
    reference = measure.record_steps(workload, workload.model, num_steps=NUM_EQUALITY_STEPS)
    for candidate in candidates:
        record = common | candidate.record
        if candidate.step is not None:
            key = candidate.key
            record |= _budget_record(candidate, common, peaks[key], resident.get(key), times[key])
            _say(f"comparing {NUM_EQUALITY_STEPS} steps at budget {candidate.given} with eager")
            ours = measure.record_steps(workload, candidate.module, num_steps=NUM_EQUALITY_STEPS)
            record |= _equality_record(ours, reference)
        yield record


# --- steps and peaks -------------------------------------------------------------------------


def _peer_step(workload: models.Workload, peer: peers.Peer) -> Callable[[], Tensor]:
    batch = workload.make_batch(1)

    def step() -> Tensor:
        with peer(workload) as model:
            return measure.training_step(workload, model, batch, seed=1)

    return step


def _module_step(workload: models.Workload, module: Callable[..., Any]) -> Callable[[], Tensor]:
    batch = workload.make_batch(1)
    return lambda: measure.training_step(workload, module, batch, seed=1)


def _peak(workload: models.Workload, step: Callable[[], Tensor], device: str) -> int:
    _warm_up(workload, step)
    return measure.allocator_peak(step, device=device)


def _warm_up(workload: models.Workload, step: Callable[[], Tensor]) -> None:
    # The first step allocates library buffers and `.grad`.
    step()
    workload.model.zero_grad(set_to_none=False)


# --- planning --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One budget as given, its record, and the step that runs it; None if infeasible."""

    given: str
    record: Record
    module: Any = None
    step: Callable[[], Tensor] | None = None

    @property
    def key(self) -> str:
        return f"budget {self.given}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    record: Record
    candidates: list[_Candidate]


def _plan_all(
    workload: models.Workload, options: argparse.Namespace, checkpoint_bytes: int | None
) -> _Planned:
    _say("planning")
    planner, construct_s = _timed(lambda: _planner(workload))
    baseline_bytes, minimum_bytes = planner.baseline_peak_bytes, planner.minimum_peak_bytes
    candidates = []
    for given in dict.fromkeys(options.budget):
        budget = _budget_value(given, minimum_bytes, checkpoint_bytes)
        candidates.append(_candidate(workload, planner, given, budget))
    record = {
        "baseline_peak_bytes": baseline_bytes,
        "minimum_peak_bytes": minimum_bytes,
        "planner_construct_s": construct_s,
        "planner_timings": _timings(planner),
    }
    return _Planned(record=record, candidates=candidates)


def _planner(workload: models.Workload) -> Planner:
    # Imported here, so that the peers can be measured without it.
    from rockmate import Planner

    return Planner(workload.model, workload.sample, numerics="bitwise")


def _candidate(
    workload: models.Workload, planner: Planner, given: str, budget: float | str
) -> _Candidate:
    from rockmate import InfeasibleBudgetError

    record: Record = {"budget": given}
    try:
        plan, plan_s = _timed(lambda: planner.plan(budget))
    except InfeasibleBudgetError as error:
        bounds = {"budget_bytes": error.budget_bytes, "minimum_bytes": error.minimum_bytes}
        return _Candidate(given=given, record=record | {"feasible": False} | bounds)
    module, module_s = _timed(lambda: planner.module(budget, trial="never"))
    record |= {
        "feasible": True,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_ms": plan.predicted_ms,
        "predicted_baseline_ms": plan.baseline_ms,
        "predicted_ratio": plan.predicted_ms / plan.baseline_ms,
        "plan_s": plan_s,
        "module_s": module_s,
    }
    return _Candidate(
        given=given, record=record, module=module, step=_module_step(workload, module)
    )


def _budget_value(given: str, minimum_bytes: int, checkpoint_bytes: int | None) -> float | str:
    """The planner's budget: bytes as int, a fraction as float, other text as it is."""
    if given == "minimum":
        return minimum_bytes
    if given == "checkpoint":
        assert checkpoint_bytes is not None
        return checkpoint_bytes
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return given


def _timings(planner: Planner) -> Record:
    return dict(planner.timings)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


# --- the second process ----------------------------------------------------------------------


def _resident_in_child(
    options: argparse.Namespace, candidates: Sequence[_Candidate]
) -> dict[str, Any]:
    """Resident peaks by name, and the meter's calibration; empty if not measured."""
    if options.no_resident or torch.device(options.device).type != "cpu":
        return {}
    _say("measuring resident peaks in a second process")
    command = [sys.executable, "-m", "bench.run", "--resident", "--model", options.model]
    command += ["--seed", str(options.seed)]
    command += ["--tiny"] * options.tiny + ["--checkpoint"] * options.checkpoint
    for candidate in candidates:
        command += ["--budget", str(candidate.record["budget_bytes"])]
    environment = os.environ | measure.RESIDENT_ENVIRONMENT
    root = Path(__file__).resolve().parent.parent
    finished = subprocess.run(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, check=True, text=True
    )
    peaks = json.loads(finished.stdout)
    by_name = {
        name: peaks[name] for name in ("eager", "checkpoint", "calibration") if name in peaks
    }
    for candidate in candidates:
        peak_bytes = peaks.get(str(candidate.record["budget_bytes"]))
        if peak_bytes is not None:
            by_name[candidate.key] = peak_bytes
    return by_name


def _resident_peaks(options: argparse.Namespace) -> Record:
    """The report of the second process: resident peaks by peer and by budget in bytes."""
    workload = models.build(options.model, tiny=options.tiny, seed=options.seed)
    steps = {"eager": _peer_step(workload, peers.eager)}
    if options.checkpoint:
        steps["checkpoint"] = _peer_step(workload, peers.checkpoint_per_layer)
    result: Record = {"calibration": measure.resident_calibration()}
    # The peers first: heap memory that planning leaves would hide small blocks of theirs.
    result |= {name: _resident_peak(workload, step) for name, step in steps.items()}
    if options.budget:
        planner = _planner(workload)
        for given in options.budget:
            candidate = _candidate(workload, planner, given, int(given))
            if candidate.step is not None:
                result[given] = _resident_peak(workload, candidate.step)
    return result


def _resident_peak(workload: models.Workload, step: Callable[[], Tensor]) -> int:
    _warm_up(workload, step)
    return measure.resident_peak(step)


# --- records ---------------------------------------------------------------------------------


def _peer_record(
    name: str, peak_bytes: int, resident: int | None, times: measure.StepTimes
) -> Record:
    return {
        f"{name}_peak_bytes": peak_bytes,
        f"{name}_resident_peak_bytes": resident,
        f"{name}_ms": times.median_ms,
        f"{name}_spread_ms": times.spread_ms,
        f"{name}_ratio": times.ratio,
    }


def _budget_record(
    candidate: _Candidate,
    common: Record,
    peak_bytes: int,
    resident: int | None,
    times: measure.StepTimes,
) -> Record:
    plan = candidate.record
    budget_bytes, predicted_bytes = plan["budget_bytes"], plan["predicted_peak_bytes"]
    # Library scratch is not part of the budget; eager's is taken as ours.
    eager_resident = common["eager_resident_peak_bytes"]
    scratch = (
        None if eager_resident is None else max(0, eager_resident - common["eager_peak_bytes"])
    )
    prediction_error = predicted_bytes / peak_bytes - 1
    baseline_error = common["baseline_peak_bytes"] / common["eager_peak_bytes"] - 1
    return {
        "peak_bytes": peak_bytes,
        "resident_peak_bytes": resident,
        "peak_of_eager": peak_bytes / common["eager_peak_bytes"],
        "ms": times.median_ms,
        "spread_ms": times.spread_ms,
        "ratio": times.ratio,
        "ratio_spread": times.ratio_spread,
        "peak_prediction_error": prediction_error,
        "baseline_prediction_error": baseline_error,
        "ratio_prediction_error": plan["predicted_ratio"] - times.ratio,
        "fits": peak_bytes <= budget_bytes,
        "fits_resident": None if resident is None else resident <= budget_bytes,
        "fits_resident_less_scratch": (
            None if resident is None or scratch is None else resident - scratch <= budget_bytes
        ),
        "peak_prediction_within_2_percent": abs(prediction_error) <= PREDICTION_TOLERANCE,
        "faster_than_checkpoint": (
            times.ratio < common["checkpoint_ratio"] if "checkpoint_ratio" in common else None
        ),
        "smaller_than_checkpoint": (
            peak_bytes < common["checkpoint_peak_bytes"]
            if "checkpoint_peak_bytes" in common
            else None
        ),
    }


def _equality_record(
    ours: Sequence[measure.StepRecord], reference: Sequence[measure.StepRecord]
) -> Record:
    pairs = list(zip(ours, reference, strict=True))
    differences = [measure.tensor_difference(own.gradients, ref.gradients) for own, ref in pairs]
    return {
        "gradients_equal": [difference.equal for difference in differences],
        "gradient_differences": [asdict(difference) for difference in differences],
        "losses_equal": [bool(torch.equal(own.loss, ref.loss)) for own, ref in pairs],
        "buffers_equal": [
            measure.tensor_difference(own.buffers, ref.buffers).equal for own, ref in pairs
        ],
        "random_state_equal": [
            bool(torch.equal(own.random_state, ref.random_state)) for own, ref in pairs
        ],
    }


def _write_line(record: Record) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _say(message: str) -> None:
    sys.stderr.write(f"bench: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
