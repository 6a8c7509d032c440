"""Our plans for one model's comparison: the budgets of a sweep, and the measured peak of each peer.

`bench.comparison.measurement` starts it when the peers' peaks are measured. It gives a record of a
kind of `bench.comparison` for each plan, and saves the plan in a file.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bench import models
from bench.command import Record
from bench.comparison.result import OURS
from rockmate import InfeasibleBudgetError, Plan, Planner
from rockmate.planning.candidate import linspace_int

IN_TWICE = "in 2x"
"""In place of a share: the smallest budget whose predicted time is at most twice the baseline's."""

_TWICE = 2.0
_NUM_STEPS = 64
"""Into so many the range of budgets falls in which that one is searched."""

_METHOD = re.compile(rf"{OURS}: (?:(minimum)|({IN_TWICE})|at ([0-9.]+) MB|(0?\.[0-9]+|1(?:\.0*)?))")
"""A share of the peak, or what stands in its place: that of a peer with "at"."""

SHARES = ("minimum", IN_TWICE, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)

PEAK_STEP = 0.01
"""Peers whose peaks differ by less than this share one plan, made for the smallest of them."""

MEASURED = ("rounds", "method", "tiny", "loss_only")
"""The options of `bench.compare` that decide what is measured."""


def workload_of(name: str, options: Record) -> models.Workload:
    """The model with its loss inside."""
    return models.build(name, tiny=options["tiny"]).with_loss_inside()


def plan_model(name: str, options: Record, folder: str, peaks: Sequence[int]) -> Iterator[Record]:
    """Plans for one model, saved in a folder; `peaks` are the peers' in bytes."""
    workload = workload_of(name, options)
    outputs = "loss" if options["loss_only"] else "all"
    planner = Planner(workload.model, workload.sample, outputs=outputs)
    methods = options["method"] or [f"{OURS}: {share}" for share in SHARES]
    asked = {method: _budget_bytes(planner, method) for method in methods if is_ours(method)}
    yield from _plan_all(planner, Path(folder), asked | _at_peaks(planner, peaks))


def is_ours(method: str) -> bool:
    """Whether a method is a plan within a valid share."""
    return bool(_METHOD.fullmatch(method))


def _budget_bytes(planner: Planner, method: str) -> int:
    found = _METHOD.fullmatch(method)
    assert found is not None
    is_least, is_in_twice, megabytes, share = found.groups()
    if megabytes:
        return round(float(megabytes) * 1e6)
    least, peak = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    if is_in_twice:
        plans = planner.plans(linspace_int(least, peak, _NUM_STEPS + 1))
        return min(size for size, plan in plans.items() if plan.predicted_ratio <= _TWICE)
    return least if is_least else int(float(share) * peak)


def _at_peaks(planner: Planner, peaks: Iterable[int]) -> dict[str, int]:
    """Method and budget in bytes at the peaks of peers."""
    below = (each for each in peaks_to_meet(peaks) if each < planner.baseline_peak_bytes)
    return {f"{OURS}: at {each / 1e6:.6f} MB": each for each in below}


def peaks_to_meet(peaks: Iterable[int]) -> list[int]:
    """The smallest of each group of peaks within `PEAK_STEP`: its plan fits all of them."""
    chosen: list[int] = []
    for peak_bytes in sorted(peaks):
        if not chosen or peak_bytes > chosen[-1] * (1 + PEAK_STEP):
            chosen.append(peak_bytes)
    return chosen


def _plan_all(planner: Planner, folder: Path, budgets: Mapping[str, int]) -> Iterator[Record]:
    for method, budget_bytes in budgets.items():
        record = {"method": method, "owner": "ours", "budget_bytes": budget_bytes}
        begin = time.perf_counter()
        try:
            plan = planner.plan(budget_bytes)
        except InfeasibleBudgetError as error:
            yield {"kind": "infeasible", **record, "minimum_bytes": error.minimum_bytes}
            continue
        plan_s = time.perf_counter() - begin
        file = re.sub(r"[^a-z0-9.]+", "-", method.lower()) + ".json"
        plan.save(folder / file)
        yield {"kind": "plan", **record, **_promise(plan), "plan_s": plan_s, "file": file}


def _promise(plan: Plan) -> Record:
    names = ("predicted_peak_bytes", "predicted_ms", "predicted_ratio", "optimality_gap")
    return {name: getattr(plan, name) for name in names}
