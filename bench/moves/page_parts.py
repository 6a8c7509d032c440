"""The parts of the page of `bench.offload` about peers and largest batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.pages import all_row, megabytes, table, worst_row

Record = dict[str, Any]
_MOST_TIME = 1.25
_REACH = {"resnet50": 5, "resnet101": 6}


def peer_targets(found: Sequence[Record]) -> Iterator[list[str]]:
    """Targets of the comparison with others that use the disk."""
    yield all_row(
        "gradients beside peers bitwise eager's", sum(r["is_bitwise"] for r in found), len(found)
    )
    below = sum(r["own_bytes"] <= max(r["peer_bytes"], r["least_bytes"]) for r in found)
    yield all_row("peak no higher than the peer's, or than our least", below, len(found))
    equal = [r for r in found if r["peer_bytes"] >= r["least_bytes"]]
    yield worst_row(
        "time over the peer's at its peak",
        1.0,
        [(f"{r['model']}, {r['peer']}", r["over_peer"]) for r in equal],
    )


def peer_table(records: Sequence[Record]) -> list[str]:
    """A row for each model and peer."""
    rows = [
        [
            record["model"],
            record["peer"],
            megabytes(record["peer_bytes"]),
            megabytes(record["own_bytes"]),
            f"{record['peer_ratio']:.3f}",
            f"{record['ratio']:.3f}",
            f"{record['over_peer']:.3f}",
            str(record["num_moves"]),
            str(record["num_recomputations"]),
        ]
        for record in records
    ]
    columns = (
        "model", "peer", "its peak, MB", "our peak, MB", "its time", "our time", "ours over its",
        "moves", "recomputed",
    )  # fmt: skip
    text = "Times are over eager's. All use the same disk, in turn; see `bench/moves/peers.py`."
    return ["## Peers with the same disk", "", text, "", *table(columns, rows)]


def batch_targets(found: Sequence[Record]) -> Iterator[list[str]]:
    """Targets of the largest batches; a target is a lower limit."""
    for name, reach in _REACH.items():
        own = [r for r in found if r["model"] == name]
        times = [r["largest"] / r["rows"] for r in own]
        is_hit = bool(own) and min(times) >= reach
        figure = ", ".join(f"{each:.3g} {_where(r)}" for r, each in zip(own, times, strict=True))
        verdict = ("hit" if is_hit else "**miss**") if own else "not measured"
        what = f"{name}: largest batch over eager's, in its memory"
        yield [what, f">= {reach}", figure, "", verdict]
    yield worst_row(
        "time a sample over eager's there",
        _MOST_TIME,
        [(f"{r['model']} {_where(r)}", r["time_ratio"]) for r in found],
    )
    measured = [r for r in found if "measured_peak_bytes" in r]
    yield all_row(
        "measured peak of the largest batch within eager's memory",
        sum(r["measured_peak_bytes"] + r["batch_bytes"] <= r["memory_bytes"] for r in measured),
        len(measured),
    )


def batch_table(records: Sequence[Record]) -> list[str]:
    """A row for each model, simulated and measured."""
    rows = [
        [
            record["model"],
            _where(record),
            str(record["pixels"]),
            str(record["rows"]),
            megabytes(record["memory_bytes"]),
            str(record["largest_without_moves"]),
            str(record["largest"]),
            f"{record['time_ratio']:.3f}",
            str(record["num_moves"]),
            str(record["num_recomputations"]),
            megabytes(record["host_bytes"]),
        ]
        for record in records
    ]
    columns = (
        "model", "where", "pixels", "eager's batch", "its memory, MB", "by recomputation alone",
        "with moves", "time a sample", "moves", "recomputed", "moved away, MB",
    )  # fmt: skip
    text = (
        f"The largest batch whose step takes at most {_MOST_TIME} of eager's time a sample, in the "
        "memory of eager's activations and batch. Batches are multiples of eager's."
    )
    return ["## The largest batch", "", text, "", *table(columns, rows)]


def _where(record: Record) -> str:
    return f"on {record['machine_name']}" if record["machine_name"] else "measured here"
