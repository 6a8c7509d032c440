"""The lines of `bench.comparison` as a page: how we stand against every peer, and every point behind that.

Targets are set here, before anything is measured. A peer's point is dominated if one of our plans has no greater measured peak and takes no
more time, but for `TIME_TOLERANCE`. Which of ours is held against it is decided by what plans promise: the fastest by prediction of those
whose measured peak is no greater. The luckiest measurement would be another one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.comparison import by_model
from bench.machine import hardware_text, told_by_model, versions_text

Record = dict[str, Any]

OURS = "rockmate"
ONE_PER_LAYER = "checkpoint"
TIME_TOLERANCE = 0.02
LEAST_PEAK = 0.75
LEAST_PEAK_MEDIAN = 0.6
LEAST_PEAK_RATIO = 2.5
TIME_OF_CHECKPOINT = 0.90
GRADIENT_TOLERANCE = 1e-3  # relative; beyond it a step does not train as eager's does

HOW_TIMED = (
    "Times are the processor's on one CPU thread, the wall clock's otherwise; methods take turns in one process, with a step of eager's "
    "between each four. A ratio is the median over rounds of the time over the mean of eager's before and after it, ± largest less "
    "smallest."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One method on one model.

    Attributes:
        method: name.
        family: of the method.
        owner: "peer" or "ours".
        peak_bytes: activation peak by the allocator's events.
        resident_bytes: by the resident high-water mark; None where it was not taken.
        ms: median time of a step.
        ratio: median over rounds of its time over eager's in the same round; NaN where nothing was timed.
        spread: largest less smallest of those ratios.
        prepare_s: compiling, or planning.
        gradient_difference: largest relative difference to eager's; 0 is bitwise equal.
        budget_bytes: for which it was planned, None for a peer.
        predicted_ratio: what the plan promises, over nothing recomputed, so that plans of several runs compare; None for a peer.
    """

    method: str
    family: str
    owner: str
    peak_bytes: int
    resident_bytes: int | None
    ms: float
    ratio: float
    spread: float
    prepare_s: float
    gradient_difference: float
    budget_bytes: int | None = None
    predicted_ratio: float | None = None

    @property
    def is_wrong(self) -> bool:
        """Whether the gradients are not eager's."""
        return not self.gradient_difference <= GRADIENT_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A peer's point and what we have at no greater peak, None where nothing."""

    peer: Point
    ours: Point | None

    @property
    def excess(self) -> float:
        """Our time over the peer's, less 1; infinite where we have nothing."""
        return math.inf if self.ours is None else self.ours.ratio / self.peer.ratio - 1

    @property
    def is_dominated(self) -> bool:
        """Whether ours takes no more time, but for `TIME_TOLERANCE`."""
        return self.excess <= TIME_TOLERANCE


class ModelResult:
    """All points of one model."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        """Records of `bench.comparison`, of this model."""
        self.name = name
        self.records = records
        self._plans = {record["method"]: record for record in self.of("plan")}
        self._times: dict[str, list[Record]] = {}
        for record in self.of("time"):
            self._times.setdefault(record["method"], []).append(record)
        distinct = [record for record in self.of("point") if record["same_as"] is None]
        self.points = [self._point(record) for record in distinct]
        timed = [point for point in self.points if not math.isnan(point.ratio)]
        self.peers = [point for point in timed if point.owner == "peer"]
        self.ours = [point for point in timed if point.family == OURS]

    def of(self, kind: str) -> list[Record]:
        """Its records of that kind."""
        return [record for record in self.records if record["kind"] == kind]

    def _point(self, record: Record) -> Point:
        plan, times = self._plans.get(record["method"], {}), self._times.get(record["method"], [])
        ratios = [time["ms"] / time["eager_ms"] for time in times]
        return Point(
            method=record["method"],
            family=record["family"],
            owner=record["owner"],
            peak_bytes=record["peak_bytes"],
            resident_bytes=record["resident_bytes"],
            ms=statistics.median(time["ms"] for time in times) if times else math.nan,
            ratio=statistics.median(ratios) if ratios else math.nan,
            spread=max(ratios) - min(ratios) if ratios else math.nan,
            prepare_s=record["prepare_s"],
            gradient_difference=record["gradients"]["largest_relative"],
            budget_bytes=plan.get("budget_bytes"),
            predicted_ratio=plan.get("predicted_ratio"),
        )

    @property
    def eager(self) -> Point | None:
        """Eager's point."""
        return next((point for point in self.points if point.method == "eager"), None)

    @cached_property
    def matches(self) -> list[Match]:
        """Each peer's point with ours, by falling peak."""
        ordered = sorted(self.peers, key=lambda point: -point.peak_bytes)
        return [Match(peer=peer, ours=self.within(peer.peak_bytes)) for peer in ordered]

    def within(self, peak_bytes: int) -> Point | None:
        """Of our points with no greater measured peak the one whose plan promises the least time."""
        fitting = [point for point in self.ours if point.peak_bytes <= peak_bytes]
        return min(
            fitting, key=lambda point: (point.predicted_ratio, point.peak_bytes), default=None
        )

    @property
    def checkpoint(self) -> Match | None:
        """One checkpoint a layer and ours."""
        return next((match for match in self.matches if match.peer.method == ONE_PER_LAYER), None)

    @property
    def least(self) -> Match | None:
        """The least peak of any peer, and our least peak in at most `LEAST_PEAK_RATIO` times eager's time."""
        fast = [point for point in self.ours if point.ratio <= LEAST_PEAK_RATIO]
        if not self.peers:
            return None
        peer = min(self.peers, key=lambda point: (point.peak_bytes, point.ratio))
        return Match(peer=peer, ours=min(fast, key=lambda point: point.peak_bytes, default=None))


# --- the page -------------------------------------------------------------------------------------------


def page(records: Sequence[Record]) -> list[str]:
    """The page's lines."""
    results = [ModelResult(name, own) for name, own in by_model(records).items()]
    sections = [line for result in results for line in ["", *_section(result)]]
    return [
        *_head(results),
        "",
        *_targets(results),
        "",
        *_overview(results),
        "",
        *_undominated(results),
        *sections,
    ]


def _head(results: Sequence[ModelResult]) -> list[str]:
    runs = [run for result in results for run in result.of("run")]
    first, options = runs[0], runs[0]["options"]
    hardware = told_by_model(
        (run["model"], hardware_text(run, device=options["device"])) for run in runs
    )
    loads = [run["load_average"] for run in runs]
    commits = told_by_model((run["model"], run["commit"]) for run in runs)
    return [
        f"# Every peer beside us, {'GPU' if options['device'].startswith('cuda') else 'one CPU thread'}",
        "",
        f"Machine: {hardware}, load average {min(loads):.1f} to {max(loads):.1f} at the models' starts. {versions_text(first)}. "
        f"Commit {commits}.",
        "",
        "Commands, a later one adding to what an earlier one measured:",
        "",
        *_commands(results),
        *_further_rounds(results),
        "",
        "One point: the same with `--model MODEL --method METHOD --output STEM`.",
        *_few_settings(results),
        "",
        "Peaks are the excess over what was allocated when the forward was called, `.grad` in place and the outputs held: by the "
        "allocator's events, and by the process's resident high-water mark, which also holds scratch memory of the math libraries and "
        "the C heap's slack. Every model computes its loss itself. "
        + HOW_TIMED
        + " Peers are described in `bench/peers.py`. "
        "Compiled ones run PyTorch's own kernels (AOT eager), as we do: compared is what is saved and what is recomputed, and not the "
        "fusion that `torch.compile` can do beside it. "
        "Preparing is compiling or planning. Gradients are eager's bitwise, or differ by what is shown, relative to the largest; "
        f"**wrong** ones are off by more than {GRADIENT_TOLERANCE:g}, and such points are counted all the same. MB are millions of bytes.",
    ]


def _further_rounds(results: Sequence[ModelResult]) -> list[str]:
    """What commands for single methods are for, where a model has some beside one for all."""
    if all(
        len({bool(run["options"]["method"]) for run in result.of("run")}) == 1 for result in results
    ):
        return []
    return [
        "",
        "Commands for single methods take further rounds of these and of every `rockmate: at`, as is due where a point is missed by less "
        "than its noise; medians are over the rounds of all commands.",
    ]


def _few_settings(results: Sequence[ModelResult]) -> list[str]:
    """Which models had some settings of each peer alone."""
    few = [
        result.name
        for result in results
        if all(run["options"]["quick"] for run in result.of("run"))
    ]
    if not few:
        return []
    settings = "min-cut at 0.5 alone, as a whole by `dp` and by layer by both solvers, and checkpoints on each and every second layer"
    return [
        "",
        f"With `--quick`, peers ran in some of their settings, {settings}: {', '.join(few)}.",
    ]


def _commands(results: Sequence[ModelResult]) -> list[str]:
    """What was started, with the models that it was started for."""
    models_of: dict[str, list[str]] = {}
    for result in results:
        for run in result.of("run"):
            options = run["options"]
            flags = [f"--{name}" for name in ("quick", "tiny") if options[name]]
            flags += [
                "--rounds",
                str(options["rounds"]),
                *(f'--method "{method}"' for method in options["method"]),
            ]
            command = f"python -m bench.compare --device {options['device']} {' '.join(flags)}"
            models_of.setdefault(command, []).append(result.name)
    return [
        f"- `{command}` ({', '.join(dict.fromkeys(names))})" for command, names in models_of.items()
    ]


def _targets(results: Sequence[ModelResult]) -> list[str]:
    matches = [match for result in results for match in result.matches]
    checkpoints = [(r.name, r.checkpoint.excess + 1) for r in results if r.checkpoint]
    least = [(r.name, _share_of_least(r.least)) for r in results if r.least]
    planned = [
        point for result in results for point in result.points if point.budget_bytes is not None
    ]
    num_dominated = sum(match.is_dominated for match in matches)
    num_fitting = sum(
        point.peak_bytes <= point.budget_bytes
        for point in planned
        if point.budget_bytes is not None
    )
    rows = [
        all_row(
            "peer points dominated: no more memory, no more time beyond 2 %",
            num_dominated,
            len(matches),
        ),
        worst_row(
            "time at the peak of one checkpoint a layer, of its time: largest",
            TIME_OF_CHECKPOINT,
            checkpoints,
        ),
        worst_row(
            f"least peak in {LEAST_PEAK_RATIO:g}x eager's time, of the least of any peer: largest",
            LEAST_PEAK,
            least,
        ),
        worst_row(
            "the same: median",
            LEAST_PEAK_MEDIAN,
            [("", statistics.median(share for _, share in least))] if least else [],
        ),
        all_row("our measured peaks within the budget", num_fitting, len(planned)),
    ]
    return [
        "## Numbers to reach",
        "",
        "| what | reach | figure | where | |",
        "|---|---|---|---|---|",
        *rows,
    ]


def all_row(what: str, num_hit: int, num_all: int) -> str:
    """A target that all of them have to hit."""
    verdict = "hit" if num_hit == num_all else "**miss**"
    return f"| {what} | all | {num_hit} of {num_all} | | {verdict if num_all else 'not measured'} |"


def worst_row(what: str, limit: float, figures: Sequence[tuple[str, float]]) -> str:
    """A target that the largest figure, with where it was taken, has to hit."""
    if not figures:
        return f"| {what} | <= {limit:.2f} | | | not measured |"
    where, worst = max(figures, key=lambda pair: pair[1])
    return f"| {what} | <= {limit:.2f} | {worst:.3f} | {where} | {'hit' if worst <= limit else '**miss**'} |"


def _share_of_least(least: Match) -> float:
    return math.inf if least.ours is None else least.ours.peak_bytes / least.peer.peak_bytes


def _overview(results: Iterable[ModelResult]) -> list[str]:
    lines = [
        "## Model by model",
        "",
        "| model | eager MB | eager ms | peer points | dominated | checkpoint MB | its time | ours there | of its time "
        "| least of a peer, MB | whose | ours, MB | share | our time |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return [*lines, *(_overview_row(result) for result in results)]


def _overview_row(result: ModelResult) -> str:
    eager, checkpoint, least = result.eager, result.checkpoint, result.least
    cells = [
        result.name,
        *((megabytes(eager.peak_bytes), _number(eager.ms, ".0f")) if eager else ("", "")),
    ]
    cells += [str(len(result.matches)), str(sum(match.is_dominated for match in result.matches))]
    if checkpoint:
        there = checkpoint.ours.ratio if checkpoint.ours else math.nan
        cells += [
            megabytes(checkpoint.peer.peak_bytes),
            f"{checkpoint.peer.ratio:.3f}",
            _number(there),
            f"{checkpoint.excess + 1:.3f}",
        ]
    else:
        cells += [""] * 4
    if least:
        ours = least.ours
        own = (
            (megabytes(ours.peak_bytes), f"{_share_of_least(least):.3f}", f"{ours.ratio:.3f}")
            if ours
            else ("none", "", "")
        )
        cells += [megabytes(least.peer.peak_bytes), least.peer.method, *own]
    else:
        cells += [""] * 5
    return table_row(cells)


def _undominated(results: Iterable[ModelResult]) -> list[str]:
    rows = [
        _undominated_row(result.name, match)
        for result in results
        for match in result.matches
        if not match.is_dominated
    ]
    title = "## Peer points that we do not dominate"
    if not rows:
        return [title, "", "None."]
    return [
        title,
        "",
        "Beyond is our time over theirs at no greater peak, less 1; it is within noise where it is less than the two spreads together.",
        "",
        "| model | peer | peak MB | its time | ours | our peak MB | our time | beyond | within noise | its gradients |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def _undominated_row(model: str, match: Match) -> str:
    peer, ours = match.peer, match.ours
    cells = [model, peer.method, megabytes(peer.peak_bytes), ratio_text(peer)]
    if ours is None:
        cells += ["none as small", "", "", "", ""]
    else:
        noise = ours.spread + peer.spread
        is_noise = (
            "yes" if ours.ratio - peer.ratio <= noise else "no" if noise else "unknown: one round"
        )
        cells += [
            ours.method,
            megabytes(ours.peak_bytes),
            ratio_text(ours),
            f"{100 * match.excess:.1f} %",
            is_noise,
        ]
    return table_row([*cells, gradients_text(peer)])


def _section(result: ModelResult) -> list[str]:
    eager = result.eager
    baseline = eager.peak_bytes if eager else math.nan
    lines = [
        f"## {result.name}",
        "",
        *(
            []
            if result.of("finished")
            else [f"Not finished: {len(result.points)} points so far.", ""]
        ),
        "| method | peak MB | of eager's | resident MB | time / eager | ms | prepared in s | gradients | ours at that peak: MB "
        "| time / eager | dominated |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    held = {match.peer.method: match for match in result.matches}
    for point in sorted(
        result.points, key=lambda point: (point.owner != "peer", -point.peak_bytes)
    ):
        match = held.get(point.method)
        beside = ["", "", ""]
        if match:
            own = match.ours
            beside = [megabytes(own.peak_bytes), f"{own.ratio:.3f}"] if own else ["", ""]
            beside.append("yes" if match.is_dominated else "**no**")
        cells = [point.method, megabytes(point.peak_bytes), f"{point.peak_bytes / baseline:.3f}"]
        cells += [megabytes(point.resident_bytes), ratio_text(point)]
        lines.append(
            table_row(
                [
                    *cells,
                    _number(point.ms, ".0f"),
                    f"{point.prepare_s:.1f}",
                    gradients_text(point),
                    *beside,
                ]
            )
        )
    lines += ["", *_notes(result)]
    return lines


def _notes(result: ModelResult) -> list[str]:
    same = [
        f"- {r['method']}: the same as {r['same_as']}."
        for r in result.of("point")
        if r["same_as"] is not None
    ]
    failed = [f"- {r['method']} **failed**: {r['error']}" for r in result.of("failed")]
    skipped = [f"- {r['method']} skipped: {r['why']}." for r in result.of("skipped")]
    infeasible = [
        f"- {r['method']}: {megabytes(r['budget_bytes'])} MB is below the strategy's smallest peak, {megabytes(r['minimum_bytes'])} MB."
        for r in result.of("infeasible")
    ]
    spent = [
        "- planner: "
        + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in r["timings_s"].items())
        for r in result.of("planner")
    ]
    return [*failed, *skipped, *infeasible, *same, *spent]


# --- text -----------------------------------------------------------------------------------------------


def table_row(cells: Sequence[str]) -> str:
    """One row of a table."""
    return f"| {' | '.join(cells)} |"


def megabytes(num_bytes: int | None) -> str:
    """Millions of bytes, empty for None."""
    return (
        ""
        if num_bytes is None
        else f"{num_bytes / 1e6:.4g}"
        if num_bytes < 1e8
        else f"{num_bytes / 1e6:.1f}"
    )


def _number(value: float, form: str = ".3f") -> str:
    return "" if math.isnan(value) else format(value, form)


def ratio_text(point: Point) -> str:
    """The point's time over eager's with its spread, empty where nothing was timed."""
    return "" if math.isnan(point.ratio) else f"{point.ratio:.3f} ± {point.spread:.3f}"


def gradients_text(point: Point) -> str:
    """How near the point's gradients are to eager's."""
    if point.gradient_difference == 0:
        return "bitwise"
    return (
        f"**wrong**, {point.gradient_difference:.1g}"
        if point.is_wrong
        else f"{point.gradient_difference:.1e}"
    )
