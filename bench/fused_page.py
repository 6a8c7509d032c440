"""The page of `bench.fused`. Targets are set here and in its template, before any measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.command import Record
from bench.comparison.result import TIME_TOLERANCE
from bench.pages import Target, about, filled, worst_row

SHARES = (None, 0.5, 0.25, 0.1)
"""Budgets as shares of eager's peak; None recomputes nothing."""

IN_CHUNKS = ", in chunks"
"""In the name of a method whose plans may run in chunks."""

TIME_AT = {0.5: 0.90, 0.25: 1.00, 0.1: 1.12}
"""Targets of the time over eager's of GPT-2 and Llama with fused kernels."""

BOUNDED = ("gpt2-12", "gpt2-deep", "llama")
"""The models of `TIME_AT`. The others' time is in products, attention and convolutions."""

AUTO = 1.01
"""Target of the time with kernels="auto" over that of eager's kernels within the same budget."""

_Lines = Mapping[tuple[str, str], Record]


def page(lines: Sequence[Record]) -> list[str]:
    """Targets, and a table for each model."""
    every = {(line["model"], line["method"]): line for line in lines}
    plans = {place: line for place, line in every.items() if line.get("kind") != "peer"}
    peers = [
        {**line, "is_dominated": _is_dominated(line)}
        for line in every.values()
        if line.get("kind") == "peer"
    ]
    return filled(
        "fused",
        provenance=about(list(every.values())),
        rows=[row.text for row in _rows(plans)],
        plans=list(plans.values()),
        peers=peers,
        names=dict.fromkeys(name for name, _ in every),
        tolerance=100 * TIME_TOLERANCE,
    )


def _rows(plans: _Lines) -> Iterator[Target]:
    """The targets for which a line is held against another one."""
    names = list(dict.fromkeys(name for name, _ in plans))
    peaks = [
        (name, _peak(plans, name, "fused") / _peak(plans, name, "eager"))
        for name in names
        if (name, "fused: no recomputation") in plans
    ]
    yield worst_row("peak without recomputation over that of eager's kernels", 1.0, peaks)
    for share, reach in TIME_AT.items():
        found = (_fused_at(plans, name, share) for name in names if name in BOUNDED)
        figures = [(f"{line['model']}, {line['method']}", line["ratio"]) for line in found if line]
        yield worst_row(f"time at {share} of eager's peak, GPT-2 and Llama", reach, figures)
    auto = [(name, _auto(plans, name, share)) for name in names for share in SHARES]
    found = [(name, ratio) for name, ratio in auto if ratio is not None]
    yield worst_row('time of kernels="auto" over that of eager\'s kernels', AUTO, found)


def _is_dominated(peer: Record) -> bool:
    ours = peer["our_ratio"]
    return ours is not None and ours <= peer["ratio"] * (1 + TIME_TOLERANCE)


def _peak(plans: _Lines, name: str, kernels: str) -> int:
    return plans[name, f"{kernels}: no recomputation"]["predicted_bytes"]


def _fused_at(plans: _Lines, name: str, share: float) -> Record | None:
    """The plan with fused kernels that is predicted to be the fastest."""
    methods = (f"fused: {share}", f"fused{IN_CHUNKS}: {share}")
    found = [plans[name, method] for method in methods if (name, method) in plans]
    return min(found, key=lambda line: line["predicted_ms"], default=None)


def _auto(plans: _Lines, name: str, share: float | None) -> float | None:
    """The time of the plan that is predicted to be faster, over that of eager's kernels."""
    suffix = share or "no recomputation"
    eager, fused = (plans.get((name, f"{kind}: {suffix}")) for kind in ("eager", "fused"))
    if eager is None or fused is None:
        return None
    # Without recomputation both run at their own peaks, of which the fused one is smaller.
    is_fused = fused["predicted_ms"] < eager["predicted_ms"]
    return fused["ratio"] / eager["ratio"] if is_fused else 1.0
