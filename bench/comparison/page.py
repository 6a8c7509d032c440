"""The page of a comparison: how our points stand beside every peer's.

Targets are set here, before anything is measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench import peers
from bench.command import Record
from bench.comparison.result import (
    GRADIENT_TOLERANCE,
    LEAST_PEAK_RATIO,
    TIME_TOLERANCE,
    Match,
    ModelResult,
    Point,
    by_model,
)
from bench.pages import (
    Column,
    Start,
    all_row,
    filled,
    megabytes,
    provenance,
    records_table,
    targets,
    worst_row,
)

LEAST_PEAK = 0.75
"""Target of our least peak, as a share of the least of any peer."""

LEAST_PEAK_MEDIAN = 0.6
"""The same for the median over models."""

TIME_OF_CHECKPOINT = 0.90
"""Target of our time at the peak of one checkpoint per layer, as a share of its time."""


def page(records: Sequence[Record], points_file: str = "points.csv") -> list[str]:
    """The page's lines.

    Args:
        records: of `bench.comparison`.
        points_file: the path of the table of all points, from the page.
    """
    results = [ModelResult(name, own) for name, own in by_model(records).items()]
    matches = [(result.name, match) for result in results for match in result.matches]
    undominated = [pair for pair in matches if not pair[1].is_dominated]
    return filled(
        "peers",
        num_dominated=len(matches) - len(undominated),
        num_points=len(matches),
        models=f"{len(results)} model{'s' * (len(results) > 1)}",
        tolerance=100 * TIME_TOLERANCE,
        points_file=points_file,
        targets=_targets(results),
        provenance=provenance(_starts(results)),
        further_rounds=_further_rounds(results),
        quick=_quick_settings(results),
        table=records_table(_MODELS, results),
        undominated=[_BEYOND, "", *records_table(_UNDOMINATED, undominated)]
        if undominated
        else "None.",
        measured=filled("measured"),
        gradients=GRADIENT_TOLERANCE,
    )


_BEYOND = (
    "Beyond is our time over the peer's at no greater peak, less 1. It is within noise if the "
    "difference is less than the sum of both spreads."
)


def _starts(results: Iterable[ModelResult]) -> list[Start]:
    return [
        Start(model=result.name, command=_command(run["options"]), machine=run)
        for result in results
        for run in result.of("run")
    ]


def _command(options: Record) -> str:
    words = ["python -m bench.compare"]
    words += [f"--device {options['device']}"] if "device" in options else []
    switches = ("quick", "tiny", "loss_only")
    words += [f"--{name.replace('_', '-')}" for name in switches if options.get(name)]
    words += ["--rounds", str(options["rounds"])]
    words += [f'--method "{method}"' for method in options["method"]]
    return " ".join(words)


def _further_rounds(results: Sequence[ModelResult]) -> str:
    """A note on commands for single methods, if a model has such a command beside one for all."""
    has_both = any(
        len({bool(run["options"]["method"]) for run in result.of("run")}) > 1 for result in results
    )
    return (
        "A command with `--method` adds rounds of these methods and of every plan at the peak of a "
        "peer. It was run where a point was missed by less than its noise. Medians are over the "
        "rounds of all commands."
    ) * has_both


def _quick_settings(results: Sequence[ModelResult]) -> str:
    """A note on the models that had only the quick settings of each peer."""
    quick = ", ".join(r.name for r in results if all(x["options"]["quick"] for x in r.of("run")))
    settings = ", ".join(name for name in peers.peers_for(quick=True) if ":" in name)
    note = f"With `--quick` ({quick}), families with settings have only these: {settings}."
    return note if quick else ""


def _targets(results: Sequence[ModelResult]) -> list[str]:
    matches = [match for result in results for match in result.matches]
    checkpoints = [(r.name, r.checkpoint.excess + 1) for r in results if r.checkpoint]
    least = [(r.name, _share(r.least)) for r in results if r.least]
    median = [("", statistics.median(share for _, share in least))] if least else []
    points = [point for result in results for point in result.points]
    planned = [(p.peak_bytes, p.budget_bytes) for p in points if p.budget_bytes is not None]
    dominated = f"peer points dominated, within {100 * TIME_TOLERANCE:g} % of time"
    at_checkpoint = "time at the peak of one checkpoint per layer, of its time: largest"
    least_peak = f"least peak in {LEAST_PEAK_RATIO:g}x eager's time, of the least of any peer"
    fits = sum(peak_bytes <= budget_bytes for peak_bytes, budget_bytes in planned)
    return targets(
        [
            all_row(dominated, sum(match.is_dominated for match in matches), len(matches)),
            worst_row(at_checkpoint, TIME_OF_CHECKPOINT, checkpoints),
            worst_row(f"{least_peak}: largest", LEAST_PEAK, least),
            worst_row("the same: median", LEAST_PEAK_MEDIAN, median),
            all_row("our measured peaks within the budget", fits, len(planned)),
        ]
    )


def _share(least: Match) -> float:
    return math.inf if least.ours is None else least.ours.peak_bytes / least.peer.peak_bytes


# --- tables -----------------------------------------------------------------------------------


def number_text(value: float, form: str = ".3f") -> str:
    """The number, empty for NaN."""
    return "" if math.isnan(value) else format(value, form)


def ratio_text(point: Point) -> str:
    """The point's time over eager's with its spread, empty if it was not timed."""
    return "" if math.isnan(point.ratio) else f"{point.ratio:.3f} ± {point.spread:.3f}"


def gradients_text(point: Point) -> str:
    """The difference of the point's gradients from eager's."""
    if point.gradient_difference == 0:
        return "bitwise"
    if point.is_wrong:
        return f"**wrong**, {point.gradient_difference:.1g}"
    return f"{point.gradient_difference:.1e}"


def _of(read: Callable[[Any], Any], write: Callable[[Any], str]) -> Callable[[Any], str]:
    """A cell that is empty where what it reads is not there."""
    return lambda record: "" if (value := read(record)) is None else write(value)


_MODELS: tuple[Column, ...] = (
    ("model", lambda r: r.name),
    ("eager MB", _of(lambda r: r.eager, lambda p: megabytes(p.peak_bytes))),
    ("eager ms", _of(lambda r: r.eager, lambda p: number_text(p.ms, ".0f"))),
    ("peer points", lambda r: str(len(r.matches))),
    ("dominated", lambda r: str(sum(match.is_dominated for match in r.matches))),
    ("checkpoint MB", _of(lambda r: r.checkpoint, lambda m: megabytes(m.peer.peak_bytes))),
    ("its time", _of(lambda r: r.checkpoint, lambda m: f"{m.peer.ratio:.3f}")),
    ("ours there", _of(lambda r: r.checkpoint and r.checkpoint.ours, lambda p: f"{p.ratio:.3f}")),
    ("of its time", _of(lambda r: r.checkpoint, lambda m: f"{m.excess + 1:.3f}")),
    ("least of a peer, MB", _of(lambda r: r.least, lambda m: megabytes(m.peer.peak_bytes))),
    ("whose", _of(lambda r: r.least, lambda m: m.peer.method)),
    (
        "ours, MB",
        _of(lambda r: r.least, lambda m: megabytes(m.ours.peak_bytes) if m.ours else "none"),
    ),
    ("share", _of(lambda r: r.least and r.least.ours and r.least, lambda m: f"{_share(m):.3f}")),
    ("our time", _of(lambda r: r.least and r.least.ours, lambda p: f"{p.ratio:.3f}")),
)
# Of pairs of a model's name and a match.
_UNDOMINATED: tuple[Column, ...] = (
    ("model", lambda p: p[0]),
    ("peer", lambda p: p[1].peer.method),
    ("peak MB", lambda p: megabytes(p[1].peer.peak_bytes)),
    ("its time", lambda p: ratio_text(p[1].peer)),
    ("ours", lambda p: p[1].ours.method if p[1].ours else "none as small"),
    ("our peak MB", _of(lambda p: p[1].ours, lambda own: megabytes(own.peak_bytes))),
    ("our time", _of(lambda p: p[1].ours, ratio_text)),
    ("beyond", lambda p: f"{100 * p[1].excess:.1f} %" if p[1].ours else ""),
    ("within noise", lambda p: _noise_text(p[1].ours, p[1].peer) if p[1].ours else ""),
    ("its gradients", lambda p: gradients_text(p[1].peer)),
)
_README = {
    "llama": "Llama type",
    "llama-lora": "Llama type with LoRA",
    "gpt2-deep": "GPT-2, 24 layers",
    "gpt2-1row": "GPT-2, full vocabulary",
    "bert-narrow": "BERT, narrow",
    "t5-small": "T5-small",
    "vit-small": "ViT-small",
    "resnet50": "ResNet-50",
}
_README_COLUMNS: tuple[Column, ...] = (
    ("model", lambda r: _README[r.name]),
    ("eager", lambda r: megabytes(r.eager.peak_bytes)),
    ("checkpoint: peak, time", lambda r: _peak_and_time(r.checkpoint.peer)),
    (
        "rockmate there",
        lambda r: f"{r.checkpoint.ours.ratio:.3f}" if r.checkpoint.ours else "none as small",
    ),
    ("smallest peak of others", lambda r: megabytes(r.least.peer.peak_bytes)),
    (
        "rockmate's, time",
        lambda r: _peak_and_time(r.least.ours) if r.least.ours else "none as fast",
    ),
)


def _peak_and_time(point: Point) -> str:
    return f"{megabytes(point.peak_bytes)}, {point.ratio:.3f}"


def readme_table(results: Sequence[ModelResult]) -> list[str]:
    """README's table of results."""
    found = {result.name: result for result in results}
    return records_table(_README_COLUMNS, [found[name] for name in _README if name in found])


def _noise_text(ours: Point, peer: Point) -> str:
    noise = ours.spread + peer.spread
    if ours.ratio - peer.ratio <= noise:
        return "yes"
    return "no" if noise else "unknown: one round"
