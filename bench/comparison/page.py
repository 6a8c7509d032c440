"""The page of a comparison, its table of all points, and a picture of each model.

Targets are set in its template, before anything is measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import peers
from bench.command import Record
from bench.comparison.result import (
    GRADIENT_TOLERANCE,
    LEAST_PEAK_RATIO,
    OURS,
    TIME_TOLERANCE,
    ModelResult,
    Point,
    by_model,
)
from bench.pages import INK, PEER_COLOR, STRATEGIES, Line, about, filled, picture


def page(records: Sequence[Record], points_file: str = "points.csv") -> list[str]:
    """The page's lines.

    Args:
        records: of `bench.comparison`.
        points_file: the path of the table of all points, from the page.
    """
    results = [ModelResult(name, own) for name, own in by_model(records).items()]
    shares = [result.least.share for result in results if result.least]
    points = [point for result in results for point in result.points]
    return filled(
        "peers",
        results=results,
        matches=[match for result in results for match in result.matches],
        median=[statistics.median(shares)] if shares else [],
        planned=[point for point in points if point.budget_bytes is not None],
        tolerance=100 * TIME_TOLERANCE,
        least_ratio=LEAST_PEAK_RATIO,
        gradients=GRADIENT_TOLERANCE,
        points_file=points_file,
        provenance=about(_starts(results)),
        further_rounds=_further_rounds(results),
        quick=_quick_settings(results),
    )


def _starts(results: Iterable[ModelResult]) -> list[Record]:
    return [
        run | {"model": result.name, "command": _command(run["options"])}
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


def readme_table(results: Sequence[ModelResult]) -> list[str]:
    """README's table of results."""
    found = {result.name: result for result in results}
    named = {text: found[name] for name, text in _README.items() if name in found}
    return filled("readme", results=named)


def points_csv(results: Sequence[ModelResult]) -> str:
    """All methods of all models as CSV; one without a point has a note that says why."""
    return "\n".join(filled("points.csv", results=results)) + "\n"


# --- picture ----------------------------------------------------------------------------------

_MARKERS = {
    "eager": ("*", INK),
    "checkpoint": ("o", PEER_COLOR),
    "sqrt(n) segments": ("s", "#d9822b"),
    "checkpoint_sequential": ("D", "#b8a12e"),
    "selective": ("^", "#8a55a8"),
    "default partitioner": ("P", "#6b7280"),
    "min-cut": ("v", "#0f8b8d"),
    "min-cut by layer": (">", "#d1495b"),
    "inductor": ("p", "#3a5a40"),
    "inductor by layer": ("h", "#588157"),
    "inductor, checkpoints": ("<", "#a3b18a"),
    "inductor by layer, checkpoints": ("d", "#344e41"),
}
_TOP_RATIO = 2.6
"""Largest ratio of the picture; a slower point is drawn at this edge."""


def save_picture(result: ModelResult, path: Path) -> None:
    """Draws the model's timed points: markers for peers, a line for each of our strategies."""
    eager = result.eager
    assert eager is not None, "a picture is scaled by eager's peak"

    def places(points: Iterable[Point]) -> list[tuple[float, float]]:
        return [(p.peak_bytes / eager.peak_bytes, min(p.ratio, _TOP_RATIO)) for p in points]

    lines = []
    for strategy, color in (STRATEGIES | {"none": INK}).items():
        own = [p for p in result.points if p.owner == "ours" and p.family == strategy]
        timed = sorted((p for p in own if not math.isnan(p.ratio)), key=lambda p: p.peak_bytes)
        width = 2.2 if strategy == OURS else 1.0
        style = {"color": color, "marker": ".", "linewidth": width, "label": f"ours: {strategy}"}
        lines += [Line(places(timed), style)] if timed else []
    for family, (marker, color) in _MARKERS.items():
        own = [point for point in result.peers if point.family == family]
        style = {"color": color, "marker": marker, "linestyle": "", "label": family}
        words = [_setting(point) for point in own]
        lines += [Line(places(own), style, words=words)] if own else []
    size = f"{eager.peak_bytes / 1e6:.4g} MB and {eager.ms:.4g} ms a step in eager"
    picture(
        path,
        f"{result.name}: {size}",
        lines,
        across="measured activation peak, as a share of eager's",
        up="time of a step over eager's",
        limits=(min(0.9, *(y for line in lines for _, y in line.points)), None),
    )


def _setting(point: Point) -> str:
    setting = point.method.partition(": ")[2]
    if not setting and point.family == "checkpoint":
        setting = "every layer"
    return setting + (" (wrong gradients)" if point.is_wrong else "")
