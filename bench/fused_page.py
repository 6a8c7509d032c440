"""The page of `bench.fused`. Targets are set here, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.command import Record
from bench.comparison.result import TIME_TOLERANCE
from bench.pages import Column, Start, all_row, provenance, records_table, targets, worst_row

SHARES = (None, 0.5, 0.25, 0.1)
"""Budgets as shares of eager's peak; None recomputes nothing."""

IN_CHUNKS = ", in chunks"
"""In the name of a method whose plans may run in chunks."""

TIME_AT = {0.5: 0.90, 0.25: 1.00, 0.1: 1.12}
"""Targets of the time over eager's of GPT-2 and Llama with fused kernels."""

BOUNDED = ("gpt2-12", "gpt2-deep", "llama")
"""The models of `TIME_AT`. The others' time is in products, attention and convolutions."""

PREDICTED = 1.005
"""Target of the measured peak over the predicted one."""

ERROR = 1e-5
"""Target of the error of a gradient against eager's."""

COMPILE_S = 40.0
"""Target of the seconds of compilation, with nothing compiled before."""

AUTO = 1.01
"""Target of the time with kernels="auto" over that of eager's kernels within the same budget."""


def page(lines: Sequence[Record]) -> list[str]:
    """Targets, and a table for each model."""
    every = {(line["model"], line["method"]): line for line in lines}
    newest = {place: line for place, line in every.items() if line.get("kind") != "peer"}
    peers = {place: line for place, line in every.items() if line.get("kind") == "peer"}
    names = list(dict.fromkeys(name for name, _ in every))
    text = ["# Fused kernels beside eager's", ""]
    text += [*_sources(list(every.values())), ""]
    text += [*_targets(newest, list(peers.values())), ""]
    for name in names:
        own = [line for (model, _), line in newest.items() if model == name]
        text += [f"## {name}", "", *(_table(own) if own else ()), ""]
        beside = [line for (model, _), line in peers.items() if model == name]
        if beside:
            text += [f"### {name} beside Inductor", "", *records_table(_PEER_COLUMNS, beside), ""]
    return text[:-1]


def _sources(lines: Sequence[Record]) -> list[str]:
    """Where the lines come from."""
    starts = {
        (line["model"], line["command"]): Start(
            model=line["model"], command=line["command"], machine=line
        )
        for line in lines
    }
    return provenance(list(starts.values()))


def _targets(newest: dict[tuple[str, str], Record], peers: Sequence[Record]) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in newest))
    fused = [line for line in newest.values() if line["method"].startswith("fused")]
    whole = [line for line in fused if not line.get("chunks")]
    peaks = [
        (_place(line), line["peak_bytes"] / line["predicted_bytes"]) for line in newest.values()
    ]
    rows = [
        worst_row("measured peak over the predicted one", PREDICTED, peaks),
        all_row("measured peak within the budget",
                sum(line["peak_bytes"] <= line["budget_bytes"] for line in newest.values()),
                len(newest)),
        all_row("gradients of a fused plan without chunks equal those of the others, bitwise",
                sum(line["is_bitwise"] for line in whole), len(whole)),
        worst_row("error of a gradient against eager's, over the larger of 1e-5 and eager's own",
                  1.0, [(_place(line), line["error"] / _allowed_error(line)) for line in fused]),
        worst_row("peak without recomputation over that of eager's kernels", 1.0,
                  [(name, _peak(newest, name, "fused") / _peak(newest, name, "eager"))
                   for name in names if (name, "fused: no recomputation") in newest]),
    ]  # fmt: skip
    for share, reach in TIME_AT.items():
        figures = [
            (_place(line), line["ratio"])
            for name in names
            if name in BOUNDED and (line := _fused_at(newest, name, share))
        ]
        rows.append(worst_row(f"time at {share} of eager's peak, GPT-2 and Llama", reach, figures))
    auto = [(name, _auto(newest, name, share)) for name in names for share in SHARES]
    found = [(name, ratio) for name, ratio in auto if ratio is not None]
    rows.append(worst_row('time of kernels="auto" over that of eager\'s kernels', AUTO, found))
    dominated = f"points of Inductor dominated, within {100 * TIME_TOLERANCE:g} % of time"
    rows.append(all_row(dominated, sum(map(_is_dominated, peers)), len(peers)))
    seconds = [(line["model"], line["compile_s"] / COMPILE_S) for line in fused]
    rows.append(worst_row("compilation / 40 s", 1.0, seconds))
    return targets(rows)


def _peak(newest: dict[tuple[str, str], Record], name: str, kernels: str) -> int:
    return newest[name, f"{kernels}: no recomputation"]["predicted_bytes"]


def _fused_at(newest: dict[tuple[str, str], Record], name: str, share: float) -> Record | None:
    """The plan with fused kernels that is predicted to be the fastest."""
    methods = (f"fused: {share}", f"fused{IN_CHUNKS}: {share}")
    found = [newest[name, method] for method in methods if (name, method) in newest]
    return min(found, key=lambda line: line["predicted_ms"], default=None)


def _auto(newest: dict[tuple[str, str], Record], name: str, share: float | None) -> float | None:
    """The time of the plan that is predicted to be faster, over that of eager's kernels."""
    suffix = share or "no recomputation"
    eager, fused = (newest.get((name, f"{kind}: {suffix}")) for kind in ("eager", "fused"))
    if eager is None or fused is None:
        return None
    # Without recomputation both run at their own peaks, of which the fused one is smaller.
    is_fused = fused["predicted_ms"] < eager["predicted_ms"]
    return fused["ratio"] / eager["ratio"] if is_fused else 1.0


def _allowed_error(line: Record) -> float:
    """Eager's error against float64 is larger where a ReLU's input is within rounding of zero."""
    return max(ERROR, line.get("own_error", 0.0))


def _is_dominated(peer: Record) -> bool:
    ours = peer["our_ratio"]
    return ours is not None and ours <= peer["ratio"] * (1 + TIME_TOLERANCE)


def _place(line: Record) -> str:
    return f"{line['model']}, {line['method']}"


def _of_eager(key: str) -> Callable[[Record], str]:
    return lambda line: f"{line[key] / line['eager_peak_bytes']:.3f}"


def _ours(write: Callable[[Record], str], without: str = "") -> Callable[[Record], str]:
    return lambda line: without if line["our_ratio"] is None else write(line)


_COLUMNS: tuple[Column, ...] = (
    ("kernels: budget", "{method}"),
    ("peak / eager's", _of_eager("peak_bytes")),
    ("measured - predicted", lambda r: f"{r['peak_bytes'] - r['predicted_bytes']:,} B"),
    ("time / eager's", "{ratio:.3f}"),
    ("spread", "{ratio_spread:.3f}"),
    ("predicted ms", "{predicted_ms:.1f}"),
    ("recomputed", "{num_recomputed}"),
    ("chunks", lambda line: line.get("chunks", "")),
    ("gradient error", "{error:.0e}"),
)
_PEER_COLUMNS: tuple[Column, ...] = (
    ("peer", "{method}"),
    ("peak / eager's", _of_eager("peak_bytes")),
    ("time / eager's", "{ratio:.3f}"),
    ("spread", "{ratio_spread:.3f}"),
    ("our peak / eager's", _ours(_of_eager("our_peak_bytes"), "none as small")),
    ("our time / eager's", _ours("{our_ratio:.3f}".format_map)),
    ("spread", _ours("{our_spread:.3f}".format_map)),
    ("dominated", lambda line: "yes" if _is_dominated(line) else "**no**"),
    ("its gradient error", "{error:.0e}"),
)


def _table(lines: Sequence[Record]) -> list[str]:
    first = lines[0]
    summary = (
        f"{first['num_places']} groups as {first['num_kernels']} kernels, compiled in "
        f"{first['compile_s']:.1f} s; eager's peak is {first['eager_peak_bytes'] / 1e6:.1f} MB."
    )
    if "products_share" in first:
        summary += (
            f" Products, convolutions and attention, which no fusion spares, take "
            f"{first['products_share']:.1%} of the step with eager's kernels. Eager's gradients "
            f"are {first['own_error']:.0e} from those in float64, in the worse of both memory "
            "formats."
        )
    return [summary, "", *records_table(_COLUMNS, lines)]
