"""Models that are no chain, planned and run, and some chains beside them: one page, one picture.

    taskset -c 1 python -m bench.branched                 # everything; writes bench/results/branched_cpu_<yyyymm>.*
    python -m bench.branched --model bart --output /tmp/branched
    python -m bench.branched --read --output bench/results/branched_cpu_202611

Writes STEM.jsonl, STEM.md and STEM.png. Each model runs in a process of its own, as in `bench.compare`, which says what is measured and how
it goes on after an interruption; beside eager stand one checkpoint around every block and one around every stage. Targets are set here,
before anything is measured. Pictures need matplotlib, two of the models diffusers.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import compare, comparison, models, peers
from bench.comparison_table import (
    HOW_TIMED,
    OURS,
    ModelResult,
    Point,
    all_row,
    gradients_text,
    megabytes,
    ratio_text,
    table_row,
    worst_row,
)
from bench.machine import hardware_text, told_by_model, versions_text
from bench.panels import figure_of

Record = dict[str, Any]

SHARES = ("1.0", "0.7", "0.5", "0.35", "minimum")
PEERS = ("checkpoint", peers.STAGES)
CHAINS = ("gpt2-12", "llama", "resnet50")
HALF, GAP_DOWN_TO = "0.5", 0.35
TIME_AT_HALF, UNET_TIME_AT_HALF = 1.10, 1.05
PREDICTION_TOLERANCE = 0.02
GRADIENT_TOLERANCE = 1e-6
LEAST_PEAK = 0.8
LARGEST_GAP = 0.03
LARGEST_PROGRAM = 40
PLANNING_S = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes page and picture; 1 if a model's process died, 130 if interrupted."""
    options = _parse(arguments)
    lines = Path(f"{options.output}.jsonl")
    try:
        unfinished = [] if options.read else compare.measure_all(options, lines)
    except KeyboardInterrupt:
        comparison.say(
            f"interrupted; what was measured is in {lines}, and the same command goes on from there"
        )
        return 130
    results = [
        ModelResult(name, own) for name, own in comparison.by_model(comparison.read(lines)).items()
    ]
    results = [result for result in results if result.eager and result.of("planner")]
    if not results:
        comparison.say(f"no model has been measured in {lines}")
        return 1
    text = "\n".join(page(results)) + "\n"
    Path(f"{options.output}.md").write_text(text)
    _save(results, Path(f"{options.output}.png"))
    sys.stdout.write(text)
    for name, status in unfinished:
        comparison.say(
            f"{name}: its process ended with status {status}; start the same command again to go on"
        )
    return 1 if unfinished else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.branched", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model",
        action="append",
        choices=(*models.BRANCHED, *CHAINS),
        help="repeatable; all if left out",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed rounds, after one that is not counted"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="models of milliseconds, to see that it runs"
    )
    parser.add_argument(
        "--output", type=Path, metavar="STEM", help="where STEM.jsonl, STEM.md and STEM.png go"
    )
    parser.add_argument(
        "--read", action="store_true", help="measure nothing: write page and picture again"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; at least 1")
    if options.output is None and (options.model or options.tiny):
        parser.error("--output STEM is needed for some of the models, or tiny ones")
    options.output = (
        options.output
        or Path(__file__).parent / "results" / f"branched_cpu_{time.strftime('%Y%m')}"
    )
    options.model = options.model or (*models.BRANCHED, *CHAINS)
    options.method = [*PEERS, *(f"{OURS}: {share}" for share in SHARES)]
    options.device, options.quick, options.peers_only = "cpu", False, False
    return options


# --- what a model's records say -------------------------------------------------------------------------


def _planner(result: ModelResult) -> Record:
    return result.of("planner")[0]


def _plan(result: ModelResult, share: str) -> Record | None:
    return next((plan for plan in result.of("plan") if plan["method"] == f"{OURS}: {share}"), None)


def _point(result: ModelResult, method: str) -> Point | None:
    return next((point for point in result.points if point.method == method), None)


def _is_feasible(result: ModelResult, share: str) -> bool:
    return _plan(result, share) is not None


def _planning_s(result: ModelResult) -> float:
    """Seconds without the capture: op costs, solvers, and the budget that took longest."""
    timings = _planner(result)["timings_s"]
    return (
        timings["costs"]
        + timings["solve"]
        + max((plan["plan_s"] for plan in result.of("plan")), default=0.0)
    )


def _counts(result: ModelResult, plan: Record) -> bool:
    """Whether the budget is among those whose gap has a target: the smallest peak of some models is, too."""
    return plan["budget_bytes"] >= int(GAP_DOWN_TO * _planner(result)["baseline_peak_bytes"])


def _least_known(plan: Record) -> str:
    """What the bound says of a plan's time, so that a target below it is seen to be out of reach."""
    return f"where no schedule is below {plan['predicted_ratio'] - plan['optimality_gap']:.3f}"


def _least_of_checkpoints(result: ModelResult) -> Point | None:
    found = [point for method in PEERS if (point := _point(result, method))]
    return min(found, key=lambda point: point.peak_bytes, default=None)


def _share_of_checkpoint(result: ModelResult) -> float:
    """Our least measured peak over that of the checkpoints; NaN where one is missing."""
    peer, own = _least_of_checkpoints(result), _point(result, f"{OURS}: minimum")
    return own.peak_bytes / peer.peak_bytes if peer and own else math.nan


# --- the page -------------------------------------------------------------------------------------------


def page(results: Sequence[ModelResult]) -> list[str]:
    """The page's lines, for models that have eager's point and a planner's record."""
    return [
        *_head(results),
        "",
        *_targets(results),
        "",
        *_structure(results),
        "",
        *_budgets(results),
        "",
        *_notes(results),
    ]


def _head(results: Sequence[ModelResult]) -> list[str]:
    runs = [run for result in results for run in result.of("run")]
    first, loads = runs[0], [run["load_average"] for run in runs]
    hardware = told_by_model((run["model"], hardware_text(run)) for run in runs)
    commits = told_by_model((run["model"], run["commit"]) for run in runs)
    commands = told_by_model((run["model"], _command(run["options"])) for run in runs)
    return [
        "# Models that are no chain, and chains beside them, one CPU thread",
        "",
        f"Machine: {hardware}, load average {min(loads):.1f} to {max(loads):.1f} at the models' starts. "
        f"{versions_text(first)}. Commit {commits}.",
        "",
        f"Command: {commands}. Models and their natural modules: `bench/models`, `bench/unet.py`; "
        f"the chains ({', '.join(CHAINS)}): `bench/models.py`.",
        "",
        "Peaks are the excess over what was allocated when the forward was called, `.grad` in place and the outputs held: by the "
        "allocator's events, and by the process's resident high-water mark, which also holds scratch memory of the math libraries and "
        "the C heap's slack. "
        + HOW_TIMED
        + " Budgets are shares of the predicted peak with nothing recomputed. The gap is from the plan "
        "to the bound that no schedule beats, over the time of nothing recomputed. MB are millions of bytes.",
    ]


def _command(options: Record) -> str:
    return f"`python -m bench.branched --rounds {options['rounds']}{' --tiny' * options['tiny']}`"


def _targets(results: Sequence[ModelResult]) -> list[str]:
    planned = [(result, plan) for result in results for plan in result.of("plan")]
    points = [(_point(result, plan["method"]), plan) for result, plan in planned]
    measured = [(point, plan) for point, plan in points if point]
    within = sum(point.peak_bytes <= plan["budget_bytes"] for point, plan in measured)
    close = sum(
        abs(plan["predicted_peak_bytes"] / point.peak_bytes - 1) <= PREDICTION_TOLERANCE
        for point, plan in measured
    )
    equal = sum(point.gradient_difference <= GRADIENT_TOLERANCE for point, _ in measured)
    halves = [(result.name, _plan(result, HALF)) for result in results]
    ratios = [(name, plan["predicted_ratio"]) for name, plan in halves if plan]
    run = [
        (result.name, point.ratio)
        for result in results
        if (point := _point(result, f"{OURS}: {HALF}"))
    ]
    timed = [(name, ratio) for name, ratio in run if not math.isnan(ratio)]
    unet = [
        (f"unet, {_least_known(plan)}", plan["predicted_ratio"])
        for name, plan in halves
        if plan and name == "unet"
    ]
    placed = [
        (result, share, plan)
        for result in results
        for share in SHARES
        if (plan := _plan(result, share))
    ]
    gaps = [
        (f"{result.name}, {share}", plan["optimality_gap"])
        for result, share, plan in placed
        if _counts(result, plan)
    ]
    shares = [(r.name, share) for r in results if not math.isnan(share := _share_of_checkpoint(r))]
    programs = [(r.name, _planner(r)["largest_program_ops"]) for r in results]
    rows = [
        all_row("measured peak within the budget", within, len(measured)),
        all_row("predicted peak within 2 % of the measured one", close, len(measured)),
        all_row(f"gradients equal eager's (relative {GRADIENT_TOLERANCE:g})", equal, len(measured)),
        all_row("half of the peak is feasible", len(ratios), len(halves)),
        worst_row("measured time there, of eager's: largest", TIME_AT_HALF, timed),
        worst_row(
            "measured time there, of eager's: U-Net",
            UNET_TIME_AT_HALF,
            [(name, ratio) for name, ratio in timed if name == "unet"],
        ),
        worst_row("predicted time there, of nothing recomputed: largest", TIME_AT_HALF, ratios),
        worst_row("predicted time there, of nothing recomputed: U-Net", UNET_TIME_AT_HALF, unet),
        worst_row(f"gap to the bound down to {GAP_DOWN_TO}: largest", LARGEST_GAP, gaps),
        worst_row(
            "least peak, of that of checkpoints around natural modules: largest", LEAST_PEAK, shares
        ),
        worst_row("ops that a 0/1 program gets at once: most", LARGEST_PROGRAM, programs),
        worst_row(
            "planning without capture, in s: largest",
            PLANNING_S,
            [(r.name, _planning_s(r)) for r in results],
        ),
    ]
    return [
        "## Numbers to reach",
        "",
        "| what | reach | figure | where | |",
        "|---|---|---|---|---|",
        *rows,
    ]


def _structure(results: Sequence[ModelResult]) -> list[str]:
    lines = [
        "## Model by model",
        "",
        "Forward ops: of the model, of its largest block, and of the largest part of a knapsack, over the whole graph or a span of blocks, "
        "whose choices depend on each other. A part is swept by an exact dynamic program, whose size follows from the values that are open "
        "at once, not from the ops; a knapsack with a part that is too wide for it goes to a 0/1 program, of which the largest is shown "
        "(0: none did). Planning is measuring op costs, solving, and the budget that took longest.",
        "",
        "| model | eager MB | eager ms | ops | forward ops | blocks | largest block | largest part | largest program | capture s "
        "| planning s | checkpoint MB | its time | stages MB | their time | our least MB | our time | share |",
        "|" + "---|" * 18,
    ]
    for result in results:
        eager, planner = result.eager, _planner(result)
        assert eager is not None
        cells = [result.name, megabytes(eager.peak_bytes), f"{eager.ms:.0f}"]
        sizes = (
            "num_ops",
            "num_forward_ops",
            "num_blocks",
            "largest_block_ops",
            "largest_part_ops",
            "largest_program_ops",
        )
        cells += [str(planner[key]) for key in sizes]
        cells += [f"{planner['timings_s']['capture']:.1f}", f"{_planning_s(result):.1f}"]
        for method in (*PEERS, f"{OURS}: minimum"):
            point = _point(result, method)
            cells += [megabytes(point.peak_bytes), ratio_text(point)] if point else ["", ""]
        share = _share_of_checkpoint(result)
        lines.append(table_row([*cells, "" if math.isnan(share) else f"{share:.3f}"]))
    return lines


def _budgets(results: Sequence[ModelResult]) -> list[str]:
    lines = [
        "## Budgets",
        "",
        "| model | budget | budget MB | predicted MB | measured MB | resident MB | predicted time | measured time | gap | gradients "
        "| plan s |",
        "|" + "---|" * 11,
    ]
    for result in results:
        for share in SHARES:
            plan, point = _plan(result, share), _point(result, f"{OURS}: {share}")
            if plan is None:
                least = megabytes(_planner(result)["minimum_peak_bytes"])
                lines.append(
                    table_row(
                        [result.name, share, f"infeasible: the least peak is {least} MB", *[""] * 8]
                    )
                )
                continue
            cells = [
                result.name,
                share,
                megabytes(plan["budget_bytes"]),
                megabytes(plan["predicted_peak_bytes"]),
            ]
            cells += (
                [megabytes(point.peak_bytes), megabytes(point.resident_bytes)]
                if point
                else ["failed", ""]
            )
            cells += [f"{plan['predicted_ratio']:.3f}", ratio_text(point) if point else ""]
            cells += [
                f"{plan['optimality_gap']:.2%}" if math.isfinite(plan["optimality_gap"]) else ""
            ]
            lines.append(
                table_row([*cells, gradients_text(point) if point else "", f"{plan['plan_s']:.1f}"])
            )
    return lines


def _notes(results: Sequence[ModelResult]) -> list[str]:
    return [
        f"- {r.name}: {failed['method']} **failed**: {failed['error']}"
        for r in results
        for failed in r.of("failed")
    ]


# --- the picture ----------------------------------------------------------------------------------------


def _save(results: Sequence[ModelResult], path: Path) -> None:
    """One panel a model; needs matplotlib."""
    figure, panels = figure_of(len(results), columns=4, width=3.6, height=2.8)
    for result, panel in zip(results, panels, strict=True):
        _draw(result, panel)
    panels[0].legend(frameon=False, fontsize=7)
    figure.supxlabel("measured activation peak, as a share of eager's")
    figure.supylabel("time of a step over eager's")
    figure.savefig(path, dpi=110)


def _draw(result: ModelResult, panel: Any) -> None:
    eager = result.eager
    assert eager is not None
    pairs = [(_plan(result, share), _point(result, f"{OURS}: {share}")) for share in SHARES]
    found = [
        (point.peak_bytes / eager.peak_bytes, plan, point)
        for plan, point in pairs
        if plan and point
    ]
    found.sort(key=lambda item: item[0])
    xs = [x for x, _, _ in found]
    predicted = [plan["predicted_ratio"] for _, plan, _ in found]
    panel.plot(
        xs,
        [point.ratio for _, _, point in found],
        ".-",
        color="#1f6fb4",
        linewidth=1.6,
        label="ours, measured",
    )
    panel.plot(xs, predicted, "--", color="#1f6fb4", linewidth=1.0, label="ours, predicted")
    bounds = [
        ratio - plan["optimality_gap"] for ratio, (_, plan, _) in zip(predicted, found, strict=True)
    ]
    panel.plot(
        xs, bounds, ":", color="#6b7280", linewidth=1.0, label="no schedule below, predicted"
    )
    for method, marker in zip(PEERS, "os", strict=True):
        point = _point(result, method)
        if point:
            panel.plot(
                [point.peak_bytes / eager.peak_bytes],
                [point.ratio],
                marker,
                color="#c8322b",
                markerfacecolor="none",
                label=method,
            )
    ratios = [point.ratio for _, _, point in found if not math.isnan(point.ratio)]
    panel.set_xlim(0, 1.08)
    panel.set_ylim(0.9, max([1.4, *ratios]) * 1.05)
    panel.set_title(
        f"{result.name}: {eager.peak_bytes / 1e6:.3g} MB, {eager.ms:.3g} ms", fontsize=9
    )
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e4e6ea", linewidth=0.8)


if __name__ == "__main__":
    sys.exit(main())
