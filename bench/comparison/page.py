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
from bench.comparison.lines import by_model
from bench.comparison.result import (
    GRADIENT_TOLERANCE,
    LEAST_PEAK_RATIO,
    TIME_TOLERANCE,
    Match,
    ModelResult,
    Point,
)
from bench.pages import (
    Column,
    Start,
    all_row,
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

MEASURED = (
    "A peak is the largest excess over the bytes allocated when the forward was called, with "
    "`.grad` in place and the outputs held. It is taken from the allocator's events. The resident "
    "peak is taken from the high-water mark of the process; it also counts scratch memory of "
    "math libraries and slack of the C heap. Times are processor times on one CPU thread, wall "
    "times on a GPU. Methods take turns in one process, with an eager step after every four. A "
    "ratio is a step's time over the mean of the eager times before and after it; tables give the "
    "median over rounds ± largest less smallest."
)
"""How peaks and times are measured, for the pages of comparisons."""


def page(records: Sequence[Record], points_file: str = "points.csv") -> list[str]:
    """The page's lines.

    Args:
        records: of `bench.comparison`.
        points_file: the path of the table of all points, from the page.
    """
    results = [ModelResult(name, own) for name, own in by_model(records).items()]
    device = results[0].of("run")[0]["options"]["device"]
    return [
        f"# All peers beside rockmate, {'GPU' if device.startswith('cuda') else 'one CPU thread'}",
        "",
        *_headline(results, points_file),
        "",
        *_targets(results),
        "",
        *provenance(_starts(results)),
        *_further_rounds(results),
        *_quick_settings(results),
        "",
        "## Model by model",
        "",
        *records_table(_MODELS, results),
        "",
        *_undominated(results),
        "",
        *_unfinished(results),
        *_method(),
    ]


def _headline(results: Sequence[ModelResult], points_file: str) -> list[str]:
    matches = [match for result in results for match in result.matches]
    num_dominated = sum(match.is_dominated for match in matches)
    return [
        "Other ways to train in less memory (checkpointing in several forms, selective "
        "checkpointing, the partitioners of `torch.compile`), and rockmate's plans.",
        "",
        f"**{num_dominated} of {len(matches)} points of other tools, on {len(results)} "
        f"model{'s' * (len(results) > 1)}, are dominated: at no greater measured peak, rockmate's "
        f"step takes no more time, within {100 * TIME_TOLERANCE:g} %.**",
        "",
        f"All points: [{points_file}]({points_file}).",
    ]


def _starts(results: Iterable[ModelResult]) -> list[Start]:
    return [
        Start(
            model=result.name,
            command=_command(run["options"]),
            machine=run,
            device=run["options"]["device"],
        )
        for result in results
        for run in result.of("run")
    ]


def _command(options: Record) -> str:
    words = ["python -m bench.compare --device", options["device"]]
    switches = ("quick", "tiny", "loss_only")
    words += [f"--{name.replace('_', '-')}" for name in switches if options.get(name)]
    words += ["--rounds", str(options["rounds"])]
    words += [f'--method "{method}"' for method in options["method"]]
    return " ".join(words)


def _further_rounds(results: Sequence[ModelResult]) -> list[str]:
    """A note on commands for single methods, if a model has such a command beside one for all."""
    if all(
        len({bool(run["options"]["method"]) for run in result.of("run")}) == 1 for result in results
    ):
        return []
    return [
        "",
        "A command with `--method` adds rounds of these methods and of every plan at the peak of a "
        "peer. It was run where a point was missed by less than its noise. Medians are over the "
        "rounds of all commands.",
    ]


def _quick_settings(results: Sequence[ModelResult]) -> list[str]:
    """A note on the models that had only the quick settings of each peer."""
    quick = [
        result.name
        for result in results
        if all(run["options"]["quick"] for run in result.of("run"))
    ]
    if not quick:
        return []
    settings = ", ".join(name for name in peers.peers_for(quick=True) if ":" in name)
    return [
        "",
        f"With `--quick` ({', '.join(quick)}), families with settings have only these: {settings}.",
    ]


def _targets(results: Sequence[ModelResult]) -> list[str]:
    matches = [match for result in results for match in result.matches]
    checkpoints = [(r.name, r.checkpoint.excess + 1) for r in results if r.checkpoint]
    least = [(r.name, _share(r.least)) for r in results if r.least]
    median = [("", statistics.median(share for _, share in least))] if least else []
    points = [point for result in results for point in result.points]
    planned = [(p.peak_bytes, p.budget_bytes) for p in points if p.budget_bytes is not None]
    return targets(
        [
            all_row(
                f"peer points dominated, within {100 * TIME_TOLERANCE:g} % of time",
                sum(match.is_dominated for match in matches),
                len(matches),
            ),
            worst_row(
                "time at the peak of one checkpoint per layer, of its time: largest",
                TIME_OF_CHECKPOINT,
                checkpoints,
            ),
            worst_row(
                f"least peak in {LEAST_PEAK_RATIO:g}x eager's time, of the least of any peer: "
                "largest",
                LEAST_PEAK,
                least,
            ),
            worst_row("the same: median", LEAST_PEAK_MEDIAN, median),
            all_row(
                "our measured peaks within the budget",
                sum(peak_bytes <= budget_bytes for peak_bytes, budget_bytes in planned),
                len(planned),
            ),
        ]
    )


def _share(least: Match) -> float:
    return math.inf if least.ours is None else least.ours.peak_bytes / least.peer.peak_bytes


def _method() -> list[str]:
    return [
        "## How it was measured",
        "",
        f"{MEASURED} Every model computes its loss itself. Preparing is compiling or planning. MB "
        "are millions of bytes.",
        "",
        "`bench/peers` describes the peers. Min-cut peers run PyTorch's own kernels (AOT eager), "
        "as rockmate's plans do here. So there the comparison is about which values are saved and "
        "recomputed. Inductor's peers run fused kernels; `bench.fused --peers` holds them against "
        "rockmate's plans with fused kernels.",
        "",
        "Of our points with no greater measured peak, the one with the least predicted time is "
        "compared with a peer. Gradients are bitwise eager's, or the table gives the largest "
        f"relative difference. Gradients that differ by more than {GRADIENT_TOLERANCE:g} are "
        "marked as wrong, and their points count all the same.",
        "",
        "To measure one point, add `--model MODEL --method METHOD --output STEM` to the command.",
    ]


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


def _undominated(results: Iterable[ModelResult]) -> list[str]:
    found = [
        (result.name, match)
        for result in results
        for match in result.matches
        if not match.is_dominated
    ]
    title = "## Peer points that are not dominated"
    if not found:
        return [title, "", "None."]
    return [
        title,
        "",
        "Beyond is our time over the peer's at no greater peak, less 1. It is within noise if the "
        "difference is less than the sum of both spreads.",
        "",
        *records_table(_UNDOMINATED, found),
    ]


def _noise_text(ours: Point, peer: Point) -> str:
    noise = ours.spread + peer.spread
    if ours.ratio - peer.ratio <= noise:
        return "yes"
    return "no" if noise else "unknown: one round"


def _unfinished(results: Iterable[ModelResult]) -> list[str]:
    lines = [
        f"- {result.name}: {len(result.points)} points so far."
        for result in results
        if not result.of("finished")
    ]
    return ["## Not finished", "", *lines, ""] if lines else []
