"""The page of `bench.offload`: targets, and a table for each machine and for measured models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.machine import machine_text
from bench.moves.page_parts import batch_table, batch_targets, peer_table, peer_targets
from bench.pages import all_row, megabytes, table, targets, worst_row

Record = dict[str, Any]
TIGHT = 1.2
"""The multiple of the least peak without moves at which tight plans are compared."""


def page(records: Sequence[Record]) -> list[str]:
    """The targets, and a table for each machine and for the measured models."""
    lines = ["# Moves to another memory tier", ""]
    commands = {record["command"]: record for record in records}
    for record in commands.values():
        lines += [machine_text(record), ""]
    lines += targets(_target_rows(records))
    simulated = [record for record in records if record["kind"] == "simulated"]
    for machine in dict.fromkeys(record["machine_name"] for record in simulated):
        lines += ["", *_simulated_table([r for r in simulated if r["machine_name"] == machine])]
    for kind, write in _TABLES.items():
        found = [record for record in records if record["kind"] == kind]
        lines += ["", *write(found)] if found else []
    return lines


def _target_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    planned = [r for r in records if r["kind"] == "simulated" and not r.get("everything")]
    yield from _simulated_targets(planned)
    peers = [r for r in records if r.get("everything")]
    yield worst_row(
        "time over that of moving everything, at its peak",
        1.0,
        [(r["machine_name"], r["ratio"] / r["everything_ratio"]) for r in peers],
    )
    yield from _measured_targets([r for r in records if r["kind"] == "measured"])
    yield from peer_targets([r for r in records if r["kind"] == "peer"])
    yield from batch_targets([r for r in records if r["kind"] == "batch"])


def _simulated_targets(planned: Sequence[Record]) -> Iterator[list[str]]:
    def ratio(machine: str, share: float) -> list[tuple[str, float]]:
        return [
            (f"{machine} at {share}", r["ratio"])
            for r in planned
            if r["machine_name"] == machine and abs(r["share"] - share) < 1e-3
        ]

    def over(records: Sequence[Record]) -> list[tuple[str, float]]:
        return [
            (f"{r['machine_name']} at {r['share']:.3f}", r["ratio"] / r["recompute_ratio"])
            for r in records
            if r["recompute_ratio"] is not None
        ]

    def at(machine: str, share: float) -> list[Record]:
        return [
            r for r in planned if r["machine_name"] == machine and abs(r["share"] - share) < 1e-3
        ]

    tight = [r for r in planned if abs(r["share"] / r["least_share"] - TIGHT) < 1e-2]
    bounded = [r for r in planned if 0.149 <= r["share"] <= 0.501]
    gaps = [
        (f"{r['machine_name']} at {r['share']:.2f}", r["ratio"] - r["bound_ratio"]) for r in bounded
    ]
    yield worst_row("time at half of the peak, rtx4090", 1.005, ratio("rtx4090", 0.5))
    yield worst_row("time at a tenth, rtx4090", 1.03, ratio("rtx4090", 0.1))
    yield worst_row("time over recomputation's at 0.3, h100", 0.94, over(at("h100", 0.3)))
    yield worst_row("the same at 0.1, h100", 0.88, over(at("h100", 0.1)))
    yield worst_row("the same at any budget", 1.0, over(planned))
    yield worst_row(
        "the same at 1.2 x the least peak, rtx4090",
        0.6,
        over([r for r in tight if r["machine_name"] == "rtx4090"]),
    )
    yield worst_row("distance to the bound, 0.5 to 0.15 of the peak", 0.03, gaps)
    yield worst_row(
        "seconds to plan, over those without moves",
        2.0,
        [
            (
                f"{r['machine_name']} at {r['share']:.2f}",
                (r["prepare_with_moves_s"] + r["plan_with_moves_s"])
                / (r["prepare_s"] + r["plan_s"]),
            )
            for r in planned
        ],
    )


def _measured_targets(found: Sequence[Record]) -> Iterator[list[str]]:
    yield all_row("gradients bitwise eager's", sum(r["is_bitwise"] for r in found), len(found))
    unmoved = sum(r.get("is_bitwise_unmoved", r["is_bitwise"]) for r in found)
    yield all_row("gradients bitwise those without moves", unmoved, len(found))
    within = [r for r in found if r["measured_peak_bytes"] <= r["budget_bytes"]]
    yield all_row("measured peak within the budget", len(within), len(found))
    same = [r for r in found if r["measured_host_bytes"] == r["predicted_host_bytes"]]
    yield all_row("bytes on the disk as predicted", len(same), len(found))
    peaks = [
        (_place(r), abs(r["measured_peak_bytes"] / r["predicted_peak_bytes"] - 1)) for r in found
    ]
    yield worst_row("measured peak, distance to the predicted", 0.01, peaks)
    times = [(_place(r), abs(r["measured_ratio"] / r["predicted_ratio"] - 1)) for r in found]
    yield worst_row(
        "measured time over the plan's without moves, distance to predicted", 0.08, times
    )
    planned = [
        (_place(r), abs(r["measured_ratio"] / _planned_ratio(r) - 1))
        for r in found
        if "ops_factor" in r
    ]
    yield worst_row("the same, to the time at the rates that were planned with", 0.08, planned)


def _planned_ratio(record: Record) -> float:
    """The plan's own prediction, over that of the plan without moves."""
    base_ms = record["predicted_ms"] / record["predicted_ratio"] / record["ops_factor"]
    return record["planned_ms"] / base_ms


def _place(record: Record) -> str:
    return f"{record['model']} at {record['share']:.2f}"


def _simulated_table(records: Sequence[Record]) -> list[str]:
    first = records[0]
    title = (
        f"## {first['machine_name']}: {first['num_layers']} layers, {first['num_tokens']:,} tokens"
    )
    text = (
        f"The peak without recomputation is {first['peak_bytes'] / 2**30:.1f} GiB, the step takes "
        f"{first['baseline_ms']:,.0f} ms. The least peak is {first['least_share']:.3f} of that "
        f"without moves and {first['least_with_moves_share']:.3f} with them."
    )
    rows = [_simulated_row(record) for record in records]
    columns = (
        "of the peak", "recomputation", "with moves", "bound", "moves", "recomputed", "host GiB",
        "waits", "s to plan",
    )  # fmt: skip
    return [title, "", text, "", *table(columns, rows)]


def _simulated_row(record: Record) -> list[str]:
    host = f"{record['host_bytes'] / 2**30:.1f}"
    if record.get("everything"):
        everything = f"{record['everything_ratio']:.3f} by moving everything"
        return [
            f"{record['share']:.3f}",
            everything,
            f"{record['ratio']:.3f}",
            *[""] * 3,
            host,
            "",
            "",
        ]
    without = record["recompute_ratio"]
    return [
        f"{record['share']:.3f}",
        "does not fit" if without is None else f"{without:.3f}",
        f"{record['ratio']:.3f}",
        f"{record['bound_ratio']:.3f}",
        str(record["num_moves"]),
        str(record["num_recomputations"]),
        host,
        f"{record['waits_ratio']:.3f}",
        f"{record['plan_s']:.1f} + {record['plan_with_moves_s']:.1f}",
    ]


def _measured_table(records: Sequence[Record]) -> list[str]:
    rows = [
        [
            record["model"],
            f"{record['share']:.2f}",
            str(record["num_moves"]),
            str(record["num_recomputations"]),
            megabytes(record["measured_peak_bytes"]),
            f"{record['measured_peak_bytes'] / record['predicted_peak_bytes']:.4f}",
            megabytes(record["measured_host_bytes"]),
            f"{record['predicted_ratio']:.3f}",
            f"{record['measured_ratio']:.3f}",
            f"{record['out_gb_per_s']:.1f}, {record['in_gb_per_s']:.1f}",
            "bitwise" if record["is_bitwise"] else "**differ**",
        ]
        for record in records
    ]
    columns = (
        "model", "of the peak", "moves", "recomputed", "peak, MB", "over predicted", "disk, MB",
        "predicted time", "measured time", "GB/s out, in", "gradients",
    )  # fmt: skip
    text = (
        "Times are over the plan at the whole peak, which moves and recomputes nothing. Predicted "
        "times are at the speeds of the machine and its disk at that time; see "
        "`bench/moves/measured.py`."
    )
    return ["## A disk on this machine", "", text, "", *table(columns, rows)]


_TABLES = {"measured": _measured_table, "peer": peer_table, "batch": batch_table}
