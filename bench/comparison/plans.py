"""Our plans for one model's comparison: the budgets of a sweep, and the measured peak of each peer.

`bench.comparison.measurement` starts it when the peers' peaks are measured. It gives a record of a
kind of `bench.comparison` for each plan, and saves the plan in a file.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench import models
from bench.command import Record
from bench.comparison.result import OURS
from rockmate import STRATEGIES, InfeasibleBudgetError, Plan, Planner, SolverLimitError

IN_TWICE = "in 2x"
"""In place of a share: the smallest budget whose predicted time is at most twice the baseline's."""

_TWICE = 2.0
_HALVINGS = 6
"""Steps of the bisection for that budget."""

_AT = re.compile(r"at ([0-9.]+) MB")
"""In place of a share: the peak of a peer."""

_SHARE = re.compile(rf"minimum|{IN_TWICE}|{_AT.pattern}|0?\.[0-9]+|1(\.0*)?")
SHARES = {
    OURS: ("minimum", IN_TWICE, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0),
    "rotor": ("minimum", 0.3, 0.5, 0.7),
}
QUICK_SHARES = {OURS: ("minimum", IN_TWICE, 0.5, 1.0), "rotor": ("minimum",)}
OTHER_SHARES = {"none": (1.0,), "chen": ("minimum",), "checkmate": (0.5,)}
"""Strategies with one budget. The first two have only one schedule."""

LARGEST_WHOLE_GRAPH = 150
"""Largest number of ops for which whole-graph Checkmate is tried."""

PEAK_STEP = 0.01
"""Peers whose peaks differ by less than this share one plan, made for the smallest of them."""


MEASURED = ("rounds", "method", "quick", "tiny", "loss_only")
"""The options of `bench.compare` that decide what is measured."""


def workload_of(name: str, options: Record) -> models.Workload:
    """The model with its loss inside."""
    return models.build(name, tiny=options["tiny"]).with_loss_inside()


def plan_model(name: str, options: Record, folder: str, peaks: Sequence[int]) -> Iterator[Record]:
    """Plans for one model, saved in a folder; `peaks` are the peers' in bytes."""
    workload = workload_of(name, options)
    outputs = "loss" if options["loss_only"] else "all"
    planner = Planner(workload.model, workload.sample, outputs=outputs)
    methods = options["method"]
    sweep = _asked(planner, methods) if methods else _swept(planner, options["quick"])
    yield from _plan_all(planner, Path(folder), [*sweep, *_at_peaks(planner, peaks)])


def is_ours(method: str) -> bool:
    """Whether a method names one of our strategies and a valid share."""
    strategy, _, share = method.partition(": ")
    return strategy in STRATEGIES and bool(_SHARE.fullmatch(share))


def _swept(planner: Planner, quick: bool) -> Iterator[tuple[str, str, int]]:
    """Method, strategy and budget in bytes of the full sweep."""
    shares = {**OTHER_SHARES, **(QUICK_SHARES if quick else SHARES)}
    for strategy in STRATEGIES:
        for share in shares.get(strategy, ("minimum", 0.5)):
            yield f"{strategy}: {share}", strategy, _budget_bytes(planner, strategy, share)


def _asked(planner: Planner, methods: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Method, strategy and budget in bytes of the methods that name a strategy.

    A share is a fraction of the peak, "minimum", "in 2x" or as "at 12.5 MB".
    """
    for method in methods:
        strategy, _, share = method.partition(": ")
        if is_ours(method):
            yield method, strategy, _budget_bytes(planner, strategy, share)


def _budget_bytes(planner: Planner, strategy: str, share: float | str) -> int:
    if share == IN_TWICE:
        return _least_in(planner, strategy, _TWICE)
    size = _AT.fullmatch(str(share))
    if size:
        return round(float(size[1]) * 1e6)
    return (
        planner.minimum_peak(strategy)
        if share == "minimum"
        else int(float(share) * planner.baseline_peak_bytes)
    )


def _least_in(planner: Planner, strategy: str, ratio: float) -> int:
    """The smallest budget whose predicted time is at most `ratio` times the baseline's.

    It is found to a 64th of the range.
    """
    too_small, enough = planner.minimum_peak(strategy), planner.baseline_peak_bytes
    if planner.plan(too_small, strategy=strategy).predicted_ratio <= ratio:
        return too_small
    for _ in range(_HALVINGS):
        middle = (too_small + enough) // 2
        is_enough = planner.plan(middle, strategy=strategy).predicted_ratio <= ratio
        too_small, enough = (too_small, middle) if is_enough else (middle, enough)
    return enough


def _at_peaks(planner: Planner, peaks: Iterable[int]) -> Iterator[tuple[str, str, int]]:
    """Method, strategy and budget in bytes at the peaks of peers."""
    for peak_bytes in peaks_to_meet(peaks):
        if peak_bytes < planner.baseline_peak_bytes:
            yield f"{OURS}: at {peak_bytes / 1e6:.6f} MB", OURS, peak_bytes


def peaks_to_meet(peaks: Iterable[int]) -> list[int]:
    """The smallest of each group of peaks within `PEAK_STEP`: its plan fits all of them."""
    chosen: list[int] = []
    for peak_bytes in sorted(peaks):
        if not chosen or peak_bytes > chosen[-1] * (1 + PEAK_STEP):
            chosen.append(peak_bytes)
    return chosen


def _plan_all(
    planner: Planner, folder: Path, wanted: Iterable[tuple[str, str, int]]
) -> Iterator[Record]:
    num_ops = len(planner.plan(1.0).snapshot.ops)
    for method, strategy, budget_bytes in wanted:
        record = {
            "method": method, "owner": "ours", "strategy": strategy, "budget_bytes": budget_bytes,
        }  # fmt: skip
        if strategy == "checkmate" and num_ops > LARGEST_WHOLE_GRAPH:
            why = f"the graph has more than {LARGEST_WHOLE_GRAPH} ops"
            yield {"kind": "skipped", **record, "why": why}
            continue
        begin = time.perf_counter()
        try:
            plan = planner.plan(budget_bytes, strategy=strategy)
        except InfeasibleBudgetError as error:
            yield {"kind": "infeasible", **record, "minimum_bytes": error.minimum_bytes}
            continue
        except SolverLimitError as error:
            yield {"kind": "failed", **record, "error": f"SolverLimitError: {error}"}
            continue
        plan_s = time.perf_counter() - begin
        file = re.sub(r"[^a-z0-9.]+", "-", method.lower()) + ".json"
        plan.save(folder / file)
        yield {"kind": "plan", **record, **_promise(plan), "plan_s": plan_s, "file": file}


def _promise(plan: Plan) -> Record:
    names = ("predicted_peak_bytes", "predicted_ms", "predicted_ratio", "optimality_gap")
    return {name: getattr(plan, name) for name in names}
