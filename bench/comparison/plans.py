"""Our plans for one model's comparison: the budgets of a sweep, and the measured peak of each peer.

`bench.comparison.measurement` starts it when the peers' peaks are measured. Each plan has a file.
`plans.jsonl` lists all plans in records of the kinds of `bench.comparison`. It appears only when it
is complete.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from bench.command import Record, read
from bench.comparison.lines import Lines
from bench.comparison.process import Task
from bench.comparison.result import OURS
from checkmate.reduction import reduce
from rockmate import STRATEGIES, InfeasibleBudgetError, Plan, Planner, SolverLimitError
from rockmate.bound.knapsack import knapsack_of
from rockmate.graph.blocks import partition
from rockmate.planning.rotor_family import SPANS

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


def main() -> int:
    """Plans for one model."""
    options = Task.from_command_line()
    torch.set_num_threads(1)
    options.plans.mkdir(parents=True, exist_ok=True)
    workload = options.workload()
    points = [
        record
        for record in Lines(options.lines, options.model).of("point")
        if record["owner"] == "peer"
    ]
    earlier = [
        record for record in read(options.plans / "plans.jsonl") if record["kind"] != "planner"
    ]
    known = {record["method"] for record in earlier}
    planner = Planner(workload.model, workload.sample, **options.capture)
    sweep = _asked(planner, options.method) if options.method else _swept(planner, options.quick)
    wanted = [method for method in (*sweep, *_at_peaks(planner, points)) if method[0] not in known]
    planned = list(_plan_all(planner, options.plans, wanted))
    own = {"num_peer_points": len(points)}
    records = [_planner_record(planner) | own, *earlier, *planned]
    partial_listing = options.plans / "plans.partial"
    partial_listing.write_text(
        "".join(json.dumps({**record, "model": options.model}) + "\n" for record in records)
    )
    partial_listing.rename(options.plans / "plans.jsonl")
    return 0


def _planner_record(planner: Planner) -> Record:
    return {
        "kind": "planner",
        "timings_s": dict(planner.timings),
        "baseline_peak_bytes": planner.baseline_peak_bytes,
        "baseline_ms": planner.baseline_ms,
        "minimum_peak_bytes": planner.minimum_peak_bytes,
        **_extent(planner.plan(1.0)),
    }


def _extent(plan: Plan) -> Record:
    """The size of the step and of its largest parts that a solver sees at once.

    Those are the forward ops of a block, and the ops whose choices depend on each other.
    """
    graph, chain = plan.graph, partition(plan.graph)
    spans = [
        chain.span(first, first + length - 1)
        for length in SPANS
        for first in range(len(chain.blocks) - length + 1)
    ]
    spans_at_hand = chain.carried | {storage for storage in graph.storages if storage.is_output}
    problems = [knapsack_of(graph.forward_ops, graph.backward_ops, plan.costs)[0]]
    problems += [
        knapsack_of(span.forward, span.backward, plan.costs, available=spans_at_hand)[0]
        for span in spans
    ]
    parts = [part for problem in problems for part in reduce(problem).parts]
    return {
        "num_ops": len(graph.ops),
        "num_forward_ops": len(graph.forward_ops),
        "num_blocks": len(chain.blocks),
        "largest_block_ops": max(len(block.forward) for block in chain.blocks),
        "largest_part_ops": max((len(part.ops) for part in parts), default=0),
    }


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


def _at_peaks(planner: Planner, points: Iterable[Record]) -> Iterator[tuple[str, str, int]]:
    """Method, strategy and budget in bytes at the peaks of peers."""
    for peak_bytes in peaks_to_meet([point["peak_bytes"] for point in points]):
        if peak_bytes < planner.baseline_peak_bytes:
            yield f"{OURS}: at {peak_bytes / 1e6:.6f} MB", OURS, peak_bytes


def peaks_to_meet(peaks: Iterable[int]) -> list[int]:
    """The smallest of each group of peaks within `PEAK_STEP`: its plan fits all of them."""
    chosen: list[int] = []
    for peak_bytes in sorted(peaks):
        if not chosen or peak_bytes > chosen[-1] * (1 + PEAK_STEP):
            chosen.append(peak_bytes)
    return chosen


def _is_beyond(planner: Planner, strategy: str) -> bool:
    return strategy == "checkmate" and len(planner.plan(1.0).snapshot.ops) > LARGEST_WHOLE_GRAPH


def _plan_all(
    planner: Planner, directory: Path, wanted: Iterable[tuple[str, str, int]]
) -> Iterator[Record]:
    for method, strategy, budget_bytes in wanted:
        record = {
            "method": method,
            "owner": "ours",
            "strategy": strategy,
            "budget_bytes": budget_bytes,
        }
        if _is_beyond(planner, strategy):
            yield {
                "kind": "skipped",
                **record,
                "why": f"the graph has more than {LARGEST_WHOLE_GRAPH} ops",
            }
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
        path = directory / (re.sub(r"[^a-z0-9.]+", "-", method.lower()) + ".json")
        plan.save(path)
        yield {"kind": "plan", **record, **_promise(plan), "plan_s": plan_s, "file": path.name}


def _promise(plan: Plan) -> Record:
    return {
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_ms": plan.predicted_ms,
        "predicted_ratio": plan.predicted_ratio,
        "optimality_gap": plan.optimality_gap,
    }


if __name__ == "__main__":
    sys.exit(main())
