"""The lines of `bench.plan_quality` as the table of numbers to reach: each row with its figure, hit or missed.

Every target is set here, before anything is measured; a row without a measurement says so, and is neither hit nor missed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.machine import hardware_text, versions_text

Record = dict[str, Any]

LARGEST_GAP = 0.02
MEDIAN_GAP = 0.01
LEAST_BUDGET = 0.25  # of the peak with nothing recomputed, at which the gap has a target
WHOLE_GRAPH_GAP = 0.01
SMALLEST_PEAK_OF_ROTOR = 0.7
PLANNING_S = {12: 3.0, 96: 15.0}
"""Layers to seconds between the capture and the first plan."""

LAYERS = {
    "gpt2-12": 12,
    "gpt2": 12,
    "bert-base": 12,
    "bert-narrow": 12,
    "vit-base": 12,
    "gpt2-96": 96,
}
SERIES = {
    "gpt2-deep": {0.48: 1.045, 0.28: 1.14, 0.18: 1.20, 0.12: 1.33},
    "bert-narrow": {0.49: 1.06, 0.31: 1.13, 0.17: 1.20, 0.10: 1.40},
    "llama": {0.48: 1.10, 0.33: 1.19, 0.25: 1.30},
}
"""Model to budget, as a fraction of the peak with nothing recomputed, to the time ratio to reach."""

ROUNDING = 1e-9  # of a time: sums of the same op times in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number to reach.

    Attributes:
        what: the number.
        reach: its target.
        figure: what was found, empty where nothing was measured.
        where: model and budget of the figure, and how many others were looked at.
        is_hit: None where nothing was measured.
    """

    what: str
    reach: str
    figure: str = ""
    where: str = ""
    is_hit: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "not measured", True: "hit", False: "**miss**"}[self.is_hit]
        return f"| {self.what} | {self.reach} | {self.figure} | {self.where} | {verdict} |"


def page(records: Sequence[Record]) -> list[str]:
    """The page's lines: the machine, the table, and what stands behind it, model by model."""
    lines = _Lines(records)
    return [*_head(records), "", *_table(rows(records)), "", *_models(lines), "", *_notes(lines)]


def rows(records: Sequence[Record]) -> list[Row]:
    """All rows, in the order in which the targets were stated."""
    lines = _Lines(records)
    return [
        *_gap_rows(lines),
        _whole_graph_row(lines),
        *_series_rows(lines),
        *_chunked_rows(lines),
        _yardstick_row(lines),
        *_soundness_rows(lines),
        _smallest_peak_row(lines),
        _smallest_peak_in_chunks_row(lines),
        *_planning_rows(lines),
        _strategy_row(lines),
    ]


class _Lines:
    """The records by kind; two-layer models are there for whole-graph Checkmate and stand apart."""

    def __init__(self, records: Iterable[Record]) -> None:
        by_kind: dict[str, list[Record]] = {}
        for record in records:
            by_kind.setdefault(record["kind"], []).append(record)
        self.models = {r["model"]: r for r in by_kind.get("model", [])}
        self.plans = by_kind.get("plan", [])
        self.feasible = [r for r in self.plans if r["is_feasible"]]
        self.ours = [r for r in self.feasible if r["strategy"] == "rockmate"]
        self.whole = [
            r for r in self.ours if not r["chunks"]
        ]  # the others run another graph, with a bound of its own
        self.yardsticks = by_kind.get("yardstick", [])
        self.chunked = by_kind.get("chunked", [])
        self.skipped = by_kind.get("skipped", [])
        self._own_ms = {_key(r): r["ms"] for r in self.ours}
        self.bounds_ms = {_key(r): r["lower_bound_ms"] for r in self.whole}

    def own_ms(self, other: Record) -> float:
        """Time of the default strategy at the budget of another record; infinite where it has no plan."""
        return self._own_ms.get(_key(other), math.inf)

    def gaps(self, model: str) -> dict[float, float]:
        """Budget to gap, at the budgets of the table."""
        return {
            r["budget"]: r["gap"]
            for r in self.ours
            if r["model"] == model and r["purpose"] == "budget"
        }

    def infeasible(self, model: str) -> list[float]:
        """Budgets of the table that the default strategy has no plan for."""
        budgets = [
            r
            for r in self.plans
            if r["model"] == model and r["purpose"] == "budget" and r["strategy"] == "rockmate"
        ]
        return [r["budget"] for r in budgets if not r["is_feasible"]]

    def gaps_of_models(self) -> dict[str, dict[float, float]]:
        """The same for each model that has them, two-layer models left out."""
        found = {model: self.gaps(model) for model in self.models if not _has_two_layers(model)}
        return {model: gaps for model, gaps in found.items() if gaps}


def _place(lines: _Lines, record: Record) -> str:
    """Model, strategy and budget of a record, in words."""
    strategy = "" if record.get("strategy", "rockmate") == "rockmate" else f" {record['strategy']}"
    return f"{record['model']}{strategy} at {record['budget_bytes'] / lines.models[record['model']]['baseline_peak_bytes']:.3f}"


def _key(record: Record) -> tuple[str, int]:
    return record["model"], record["budget_bytes"]


def _has_two_layers(model: str) -> bool:
    return model.endswith("-2layer")


# --- rows ---------------------------------------------------------------------------------------------


def _worst(
    what: str,
    reach: str,
    figures: Sequence[tuple[str, float]],
    limit: float,
    show: Callable[[float], str],
) -> Row:
    """The row of the largest of (where, figure): every figure has to be at most `limit`."""
    if not figures:
        return Row(what=what, reach=reach)
    name, worst = max(figures, key=lambda pair: pair[1])
    num_within = sum(figure <= limit for _, figure in figures)
    where = f"{name}; {num_within} of {len(figures)} within"
    return Row(
        what=what, reach=reach, figure=show(worst), where=where, is_hit=num_within == len(figures)
    )


def _every(what: str, holds: Sequence[tuple[str, bool]]) -> Row:
    """The row of (where, whether it holds): each has to."""
    if not holds:
        return Row(what=what, reach="always")
    failing = [name for name, hold in holds if not hold]
    figure = f"{len(holds) - len(failing)} of {len(holds)}"
    return Row(
        what=what, reach="always", figure=figure, where=", ".join(failing[:4]), is_hit=not failing
    )


def _gap_rows(lines: _Lines) -> list[Row]:
    gaps = lines.gaps_of_models()
    largest = [
        (f"{model} at {budget:g}", gap)
        for model, own in gaps.items()
        for budget, gap in own.items()
    ]
    medians = [(model, statistics.median(own.values())) for model, own in gaps.items()]
    in_range = [record for record in lines.chunked if record["budget"] >= LEAST_BUDGET]
    chunked = [(f"{r['model']} at {r['budget']:g}", _chunked_gap(r)) for r in in_range]
    num_infeasible = sum(len(lines.infeasible(model)) for model in gaps)
    left_out = f" ({num_infeasible} below the smallest peak left out)" if num_infeasible else ""
    return [
        _worst(
            f"gap to the lower bound, budgets from 1.0 to 0.25{left_out}: largest",
            "<= 2 %",
            largest,
            LARGEST_GAP,
            _percent,
        ),
        _worst("the same: median of a model", "<= 1 %", medians, MEDIAN_GAP, _percent),
        _worst(
            "the same of the series below down to 0.25, the loss alone returned: largest",
            "<= 2 %",
            chunked,
            LARGEST_GAP,
            _percent,
        ),
    ]


def _whole_graph_row(lines: _Lines) -> Row:
    others = [r for r in lines.plans if r["strategy"] == "checkmate"]
    gaps = [
        (
            _place(lines, other),
            (lines.own_ms(other) - other["ms"]) / lines.models[other["model"]]["baseline_ms"],
        )
        for other in others
        if other["is_feasible"] and other["is_proved"]
    ]
    num_unproved = sum(
        "why" in other or (other["is_feasible"] and not other["is_proved"]) for other in others
    )
    limits = {
        record.get("whole_graph_limit_s")
        for model, record in lines.models.items()
        if _has_two_layers(model)
    } - {None}
    capped = "".join(f", {limit:g} s a solve of the 600 allowed" for limit in limits)
    unproved = f" ({num_unproved} not proved in that time, left out)" if num_unproved else ""
    what = f"gap to whole-graph Checkmate's proved optimum, of schedules with no run in place{capped}{unproved}"
    return _worst(what, "<= 1 %", gaps, WHOLE_GRAPH_GAP, _percent)


def _series_rows(lines: _Lines) -> list[Row]:
    found = {(r["model"], r["budget"]): r for r in lines.plans if r["purpose"] == "series"}
    return [
        _series_row(
            f"{model} at {budget:g}: predicted time ratio", target, found.get((model, budget))
        )
        for model, targets in SERIES.items()
        for budget, target in targets.items()
    ]


def _series_row(what: str, target: float, record: Record | None) -> Row:
    reach = f"<= {target:g}"
    if record is None:
        return Row(what=what, reach=reach)
    if not record["is_feasible"]:
        return Row(what=what, reach=reach, figure="infeasible", is_hit=False)
    bound = record["ratio"] * record["lower_bound_ms"] / record["ms"]
    where = f"no schedule of this graph is below {bound:.3f}" + (
        ", so the target is out of its reach" if bound > target else ""
    )
    return Row(
        what=what,
        reach=reach,
        figure=f"{record['ratio']:.3f}",
        where=where,
        is_hit=record["ratio"] <= target,
    )


def _chunked_rows(lines: _Lines) -> list[Row]:
    found = {(r["model"], r["budget"]): r for r in lines.chunked}
    return [
        _chunked_row(
            f"{model} at {budget:g}, the loss alone returned, in chunks where that is faster",
            target,
            found.get((model, budget)),
        )
        for model, targets in SERIES.items()
        for budget, target in targets.items()
    ]


def _chunked_row(what: str, target: float, record: Record | None) -> Row:
    reach = f"<= {target:g}"
    if record is None:
        return Row(what=what, reach=reach)
    where = f"{_form(record)}; none of the graphs considered has a schedule below {record['lower_bound_ratio']:.3f}"
    is_hit = record["ratio"] <= target and record["peak_bytes"] <= record["budget_bytes"]
    return Row(what=what, reach=reach, figure=f"{record['ratio']:.3f}", where=where, is_hit=is_hit)


def _yardstick_row(lines: _Lines) -> Row:
    slower = [
        (_place(lines, r), math.inf if r["ours_ms"] is None else r["ours_ms"] / r["ms"] - 1)
        for r in lines.yardsticks
    ]
    return _worst(
        "time beyond the plain knapsack's at its own peak", "<= 0", slower, ROUNDING, _percent
    )


def _soundness_rows(lines: _Lines) -> list[Row]:
    fits = [(_place(lines, r), r["peak_bytes"] <= r["budget_bytes"]) for r in lines.feasible]
    bounded = [
        (_place(lines, r), r["ms"] >= lines.bounds_ms[_key(r)] * (1 - ROUNDING))
        for r in (*lines.feasible, *lines.yardsticks)
        if _key(r) in lines.bounds_ms
    ]
    monotone = [
        (f"{model} {strategy}", _is_monotone(points))
        for model, record in lines.models.items()
        for strategy, points in record.get("frontiers", {}).items()
    ]
    ours = {model: [r for r in lines.whole if r["model"] == model] for model in lines.models}
    planned = [(model, _times_fall(plans)) for model, plans in ours.items() if plans]
    all_ours = {model: [r for r in lines.ours if r["model"] == model] for model in lines.models}
    with_chunks = [(model, _times_fall(plans)) for model, plans in all_ours.items() if plans]
    return [
        _every("simulated peak <= budget, every plan", fits),
        _every("no schedule of any strategy, nor the knapsack's, beats the lower bound", bounded),
        _every("frontier: time falls as the budget grows", monotone),
        _every(
            "plans at all budgets tried, not in chunks: none slower than one for less memory",
            planned,
        ),
        _every("the same, those in chunks among them", with_chunks),
    ]


def _is_monotone(points: Sequence[Sequence[float]]) -> bool:
    return all(
        smaller[0] < larger[0] and smaller[1] > larger[1] for smaller, larger in pairwise(points)
    )


def _times_fall(plans: Iterable[Record]) -> bool:
    ordered = sorted(plans, key=lambda r: (r["budget_bytes"], -r["ms"]))
    return all(
        larger["ms"] <= smaller["ms"] * (1 + ROUNDING) for smaller, larger in pairwise(ordered)
    )


def _smallest_peak_row(lines: _Lines) -> Row:
    shares = [
        (model, record["minimum_peak_bytes"]["rockmate"] / record["minimum_peak_bytes"]["rotor"])
        for model, record in lines.models.items()
        if "minimum_peak_bytes" in record and not _has_two_layers(model)
    ]
    unreachable = sum(
        record["proved_minimum_bytes"]
        > SMALLEST_PEAK_OF_ROTOR * record["minimum_peak_bytes"]["rotor"]
        for model, record in lines.models.items()
        if "minimum_peak_bytes" in record and not _has_two_layers(model)
    )
    what = f"smallest feasible peak, of Rotor's with all-or-nothing blocks ({unreachable} models proved out of reach)"
    return _worst(what, "<= 0.7", shares, SMALLEST_PEAK_OF_ROTOR, lambda share: f"{share:.3f}")


def _smallest_peak_in_chunks_row(lines: _Lines) -> Row:
    shares = [
        (
            model,
            record["loss_only_minimum_bytes"]["rockmate"]
            / record["loss_only_minimum_bytes"]["rotor"],
        )
        for model, record in lines.models.items()
        if "loss_only_minimum_bytes" in record and not _has_two_layers(model)
    ]
    what = "the same where the loss alone is returned and blocks may run in chunks"
    return _worst(what, "<= 0.7", shares, SMALLEST_PEAK_OF_ROTOR, lambda share: f"{share:.3f}")


def _planning_rows(lines: _Lines) -> list[Row]:
    planning_rows = []
    for num_layers, limit_s in PLANNING_S.items():
        records = [
            record for model, record in lines.models.items() if LAYERS.get(model) == num_layers
        ]
        first = [(record["model"], _planning_s(record)) for record in records]
        both = [
            (r["model"], _planning_s(r) + r["tightest_plan_s"])
            for r in records
            if "tightest_plan_s" in r
        ]
        what = f"planning, capture not counted, {num_layers} layers"
        for name, figures in (
            (what, first),
            (f"the same and a second plan, at the smallest peak, {num_layers} layers", both),
        ):
            planning_rows.append(
                _worst(
                    name, f"<= {limit_s:g} s", figures, limit_s, lambda seconds: f"{seconds:.2f} s"
                )
            )
    return planning_rows


def _planning_s(record: Record) -> float:
    """Everything between the capture and the first plan in hand."""
    return (
        sum(seconds for stage, seconds in record["timings_s"].items() if stage != "capture")
        + record["first_plan_s"]
    )


def _strategy_row(lines: _Lines) -> Row:
    others = [r for r in lines.feasible if r["strategy"] != "rockmate"]
    slower = [
        (f"against {_place(lines, other)}", lines.own_ms(other) / other["ms"] - 1)
        for other in others
    ]
    return _worst(
        "time beyond another strategy's at the same budget", "<= 0", slower, ROUNDING, _percent
    )


# --- text ---------------------------------------------------------------------------------------------


def _head(records: Sequence[Record]) -> list[str]:
    first = records[0]
    starts = dict.fromkeys((r["command"], r["commit"], r["load_average"]) for r in records)
    return [
        "# How good plans are",
        "",
        f"Machine: {hardware_text(first)}. {versions_text(first)}."
        + (" Tiny models." if first["tiny"] else ""),
        "",
        "Commands (commit, and the load average when each began, in brackets):",
        "",
        *[f"- `{command}` ({commit}, {load:.1f})" for command, commit, load in starts],
        "",
        "Nothing is run: times are sums of op times, each measured alone, and peaks are simulated. A budget is a fraction of the peak "
        "with nothing recomputed, a gap a fraction of the time with nothing recomputed. MB are millions of bytes. The graph is that "
        "of the step as it was captured, with the outputs returned and the loss in one piece, unless a row says otherwise.",
    ]


def _table(table: Iterable[Row]) -> list[str]:
    return [
        "## Numbers to reach",
        "",
        "| what | reach | figure | where | |",
        "|---|---|---|---|---|",
        *map(str, table),
    ]


def _models(lines: _Lines) -> list[str]:
    text = [
        "## Model by model",
        "",
        "Peaks are fractions of the baseline's. An infeasible budget is one below the smallest peak; below the proved one nothing fits.",
        "",
        "| model | ops | baseline MB | baseline ms | gap, largest | at | gap, median | infeasible | smallest peak | proved "
        "| of Rotor's | of Rotor's, in chunks | beyond the knapsack, most | capture s | costs s | solve s | first plan s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return [*text, *(_model_line(lines, model) for model in lines.models)]


def _model_line(lines: _Lines, model: str) -> str:
    record, gaps = lines.models[model], lines.gaps(model)
    spent = record["timings_s"]
    cells = [
        model,
        str(record["num_ops"]),
        f"{record['baseline_peak_bytes'] / 1e6:.1f}",
        f"{record['baseline_ms']:.0f}",
    ]
    at = max(gaps, key=lambda budget: gaps[budget], default=None)
    cells += (
        ["", "", ""]
        if at is None
        else [_percent(gaps[at]), f"{at:g}", _percent(statistics.median(gaps.values()))]
    )
    cells.append(", ".join(f"{budget:g}" for budget in lines.infeasible(model)))
    if "minimum_peak_bytes" in record:
        minimum, baseline = record["minimum_peak_bytes"], record["baseline_peak_bytes"]
        cells += [
            f"{minimum['rockmate'] / baseline:.3f}",
            f"{record['proved_minimum_bytes'] / baseline:.3f}",
        ]
        in_chunks = record["loss_only_minimum_bytes"]
        cells += [f"{least['rockmate'] / least['rotor']:.3f}" for least in (minimum, in_chunks)]
    else:
        cells += ["", "", "", ""]
    beyond = [
        r["ours_ms"] / r["ms"] - 1
        for r in lines.yardsticks
        if r["model"] == model and r["ours_ms"] is not None
    ]
    cells.append(_percent(max(beyond)) if beyond else "")
    cells += [f"{spent[stage]:.1f}" for stage in ("capture", "costs", "solve")] + [
        f"{record['first_plan_s']:.2f}"
    ]
    return f"| {' | '.join(cells)} |"


def _notes(lines: _Lines) -> list[str]:
    own = {model: record for model, record in lines.models.items() if not _has_two_layers(model)}
    minima = [
        _minimum_note(model, record) for model, record in own.items() if "minimum_places" in record
    ]
    loose = [
        _loose_note(lines, r)
        for r in lines.ours
        if r["purpose"] == "budget" and r["gap"] > LARGEST_GAP
    ]
    chunked = [
        _chunked_note(r)
        for r in lines.chunked
        if r["budget"] >= LEAST_BUDGET and _chunked_gap(r) > LARGEST_GAP
    ]
    skipped = [
        f"- {r['model']}, knapsack that saves {r['saved_share']:g} of everything: {r['why']}"
        for r in lines.skipped
    ]
    unsolved = [
        f"- {r['model']}, {r['strategy']} at {r['budget']:g}: {r['why']}"
        for r in lines.plans
        if "why" in r
    ]
    return [
        f"## Where the gap is above {LARGEST_GAP:.0%}", "",
        "Close to the smallest peak the plan is short of room at many moments, and the bound sees a few of them.", "", *loose, *chunked, "",
        "## Where a schedule that was tried is faster than the plan", "",
        "The search is content near the bound, so that a further budget takes a fraction of a second: within 0.1 % of the step before it "
        "solves several levels, 0.25 % once it has improved what fits best of those. Farther away it is greedy, and what it comes to "
        "differs from budget to budget; a frontier leaves out what is slower. A plan in chunks may be faster than one without them for "
        "more memory: by default the step is whole wherever that fits.", "", *_beaten_notes(lines), *_rising_notes(lines), "",
        "## Where planning takes long", "", *_planning_notes(lines), "",
        "## Where the smallest peaks are, and what solvers have no answer for", "",
        "Those of the loss alone in chunks are peaks that were simulated with estimated workspaces, since measuring every chunk would take "
        "long; what Rotor needs beside them is without chunks. Chunks divide the loss block and feed-forwards: where attention or a "
        "normalization at full resolution is the largest, as in BERT, ViT, ResNet and RegNet, they gain little or nothing.", "",
        *minima, *skipped, *unsolved,
    ]  # fmt: skip


def _planning_notes(lines: _Lines) -> list[str]:
    """What the planning of models with a limit is spent on, where it takes longer than the limit."""
    notes = []
    for model, num_layers in LAYERS.items():
        record = lines.models.get(model)
        if (
            record is None
            or _planning_s(record) + record.get("tightest_plan_s", 0.0) <= PLANNING_S[num_layers]
        ):
            continue
        spent = record["timings_s"]
        second = (
            f", a second plan, at the smallest peak, {record['tightest_plan_s']:.2f} s"
            if "tightest_plan_s" in record
            else ""
        )
        notes.append(
            f"- {model}: measuring its ops takes {spent['costs']:.2f} s, where the step takes {record['baseline_ms'] / 1e3:.2f} s, "
            f"preparing to solve {spent['solve']:.2f} s, the first plan {record['first_plan_s']:.2f} s{second}."
        )
    return notes


def _minimum_note(model: str, record: Record) -> str:
    """Where the smallest peak is reached, what the op takes there by itself, and what no schedule goes below."""
    places, shares, least = (
        record["minimum_places"],
        record["minimum_own_shares"],
        record["minimum_peak_bytes"],
    )
    proved = record["proved_minimum_bytes"] / least["rotor"]
    if least["rockmate"] <= SMALLEST_PEAK_OF_ROTOR * least["rotor"]:
        verdict = ""
    elif proved > SMALLEST_PEAK_OF_ROTOR:
        verdict = f": {SMALLEST_PEAK_OF_ROTOR} is out of reach"
    else:
        verdict = f"; whether one reaches {SMALLEST_PEAK_OF_ROTOR} is not known: ours has {least['rockmate'] / least['rotor']:.3f}"
    return (
        f"- {model}: the smallest peak is reached in {places['rockmate']}, {shares['rockmate']:.0%} of it that op's own; Rotor's in "
        f"{places['rotor']}, {shares['rotor']:.0%} of it that op's own. No schedule, chunks apart, is below {proved:.3f} of Rotor's"
        f"{verdict}."
    )


def _beaten_notes(lines: _Lines) -> list[str]:
    """Yardsticks that are faster than the plan at their peak, and how near to the bound the plan is."""
    gap = {_key(r): r["gap"] for r in lines.ours}
    beaten = [
        r
        for r in lines.yardsticks
        if r["ours_ms"] is not None and r["ours_ms"] > r["ms"] * (1 + ROUNDING)
    ]
    return [
        f"- {_place(lines, r)}: the plain knapsack is {_percent(r['ours_ms'] / r['ms'] - 1)} faster; the plan is "
        f"{_percent(gap[_key(r)])} of the step above the bound."
        for r in beaten
    ]


def _rising_notes(lines: _Lines) -> list[str]:
    """Plans that are slower than another one for less memory."""
    notes = []
    for model in lines.models:
        plans = sorted(
            (r for r in lines.whole if r["model"] == model),
            key=lambda r: (r["budget_bytes"], -r["ms"]),
        )
        for smaller, larger in pairwise(plans):
            if larger["ms"] > smaller["ms"] * (1 + ROUNDING):
                beyond = _percent(larger["ms"] / smaller["ms"] - 1)
                notes.append(
                    f"- {_place(lines, larger)}: the plan at {_place(lines, smaller).rpartition(' ')[2]} is {beyond} faster."
                )
    return notes


def _loose_note(lines: _Lines, record: Record) -> str:
    """Where a plan with a large gap stands between the peaks that limit it."""
    model = lines.models[record["model"]]
    known, proved = model["minimum_peak_bytes"]["rockmate"], model["proved_minimum_bytes"]
    if record["chunks"]:
        return (
            f"- {record['model']} at {record['budget']:g}: {_percent(record['gap'])}, in chunks ({record['chunks']}), since nothing "
            "else is known to fit there; the bound is the least of those of all ways of chunking that were considered."
        )
    return (
        f"- {record['model']} at {record['budget']:g}: {_percent(record['gap'])}; the budget is {record['budget_bytes'] / known:.2f} times "
        f"the smallest peak known, {record['budget_bytes'] / proved:.2f} times what is proved to be needed."
    )


def _form(record: Record) -> str:
    return f"in {record['chunks']} chunks" if record["chunks"] else "in one piece"


def _chunked_gap(record: Record) -> float:
    return record["ratio"] - record["lower_bound_ratio"]


def _chunked_note(record: Record) -> str:
    """Where a plan of the series, the loss alone returned, has a large gap."""
    return (
        f"- {record['model']} at {record['budget']:g}, the loss alone returned: {_percent(_chunked_gap(record))}, "
        f"{_form(record)}; the bound is the least of those of all ways of chunking that were considered."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
