"""The page of `bench.fused`. Targets are set here, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.command import Record
from bench.comparison.result import TIME_TOLERANCE
from bench.pages import (
    Column,
    Goal,
    Start,
    Target,
    filled,
    judged,
    provenance,
    records_table,
    targets,
    worst_row,
)

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
    peers = [line for line in every.values() if line.get("kind") == "peer"]
    text: list[str] = []
    for name in dict.fromkeys(name for name, _ in every):
        own = [line for (model, _), line in newest.items() if model == name]
        text += [f"## {name}", "", *(_table(own) if own else ()), ""]
        beside = [line for line in peers if line["model"] == name]
        if beside:
            text += [f"### {name} beside Inductor", "", *records_table(_PEER_COLUMNS, beside), ""]
    starts = {
        (line["model"], line["command"]): Start(
            model=line["model"], command=line["command"], machine=line
        )
        for line in every.values()
    }
    return filled(
        "fused",
        provenance=provenance(list(starts.values())),
        targets=targets([*_rows(newest), *judged(_LAST_GOALS, list(every.values()))]),
        models=text,
    )


def _rows(newest: dict[tuple[str, str], Record]) -> Iterator[Target]:
    """The targets of our plans."""
    names = list(dict.fromkeys(name for name, _ in newest))
    yield from judged(_GOALS, list(newest.values()))
    yield worst_row(
        "peak without recomputation over that of eager's kernels",
        1.0,
        [
            (name, _peak(newest, name, "fused") / _peak(newest, name, "eager"))
            for name in names
            if (name, "fused: no recomputation") in newest
        ],
    )
    for share, reach in TIME_AT.items():
        found = (_fused_at(newest, name, share) for name in names if name in BOUNDED)
        figures = [(_PLACE.format_map(line), line["ratio"]) for line in found if line]
        yield worst_row(f"time at {share} of eager's peak, GPT-2 and Llama", reach, figures)
    auto = [(name, _auto(newest, name, share)) for name in names for share in SHARES]
    found = [(name, ratio) for name, ratio in auto if ratio is not None]
    yield worst_row('time of kernels="auto" over that of eager\'s kernels', AUTO, found)


def _is_fused(line: Record) -> bool:
    return line.get("kind") != "peer" and line["method"].startswith("fused")


def _is_peer(line: Record) -> bool:
    return line.get("kind") == "peer"


def _allowed_error(line: Record) -> float:
    """Eager's error against float64 is larger where a ReLU's input is within rounding of zero."""
    return max(ERROR, line.get("own_error", 0.0))


def _is_dominated(peer: Record) -> bool:
    ours = peer["our_ratio"]
    return ours is not None and ours <= peer["ratio"] * (1 + TIME_TOLERANCE)


_PLACE = "{model}, {method}"
_GOALS = (
    Goal("measured peak over the predicted one", PREDICTED,
         lambda r: r["peak_bytes"] / r["predicted_bytes"], lambda _: True, _PLACE),
    Goal("measured peak within the budget", None,
         lambda r: r["peak_bytes"] <= r["budget_bytes"], lambda _: True),
    Goal("gradients of a fused plan without chunks equal those of the others, bitwise", None,
         lambda r: r["is_bitwise"], lambda r: _is_fused(r) and not r.get("chunks")),
    Goal("error of a gradient against eager's, over the larger of 1e-5 and eager's own", 1.0,
         lambda r: r["error"] / _allowed_error(r), _is_fused, _PLACE),
)  # fmt: skip
_LAST_GOALS = (
    Goal(f"points of Inductor dominated, within {100 * TIME_TOLERANCE:g} % of time", None,
         _is_dominated, _is_peer),
    Goal("compilation / 40 s", 1.0, lambda r: r["compile_s"] / COMPILE_S, _is_fused, "{model}"),
)  # fmt: skip


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
