"""The page of `bench.cuda`: the targets, then a table for each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.machine import hardware_text, versions_text
from bench.pages import all_row, table, targets, worst_row

Record = Mapping[str, Any]
_RESERVED_TOLERANCE = 1.05
_PREDICTED_TOLERANCE = 1.01
SAVE_ON_CPU = "save_on_cpu"
"""Setting of the peer in the part with moves."""
_OVERLAP_TOLERANCE = 0.05
# Share of the baseline's peak -> largest ratio of the planned time to eager's.
_TIME_TARGETS = {"1.0": 1.02, "0.5": 1.10, "0.25": 1.20}


def page(records: Mapping[str, Sequence[Record]], machine: Record) -> str:
    """The page of finished cases."""
    lines = ["# Campaign on a GPU", ""]
    lines += targets(_target_rows(records))
    for part, write in _TABLES.items():
        done = [record for record in records[part] if "error" not in record]
        failed = [record for record in records[part] if "error" in record]
        lines += ["", f"## {part.capitalize()}", ""]
        lines += write([record for record in done if "skipped" not in record])
        lines += [
            f"\n{record['model']} {record['setting']}: {record['error']}" for record in failed
        ]
    lines += [
        "",
        "## Command, commit, machine",
        "",
        f"`{machine['command']}` at commit {machine['commit']}. "
        f"{hardware_text(machine, device='cuda' if machine['gpu'] else 'cpu')}. "
        f"{versions_text(machine)}.",
    ]
    return "\n".join(lines) + "\n"


def _target_rows(records: Mapping[str, Sequence[Record]]) -> list[list[str]]:
    steps = [
        record
        for part in ("step", "fused", "offload")
        for record in records[part]
        if "error" not in record and "budget_bytes" in record
    ]
    fits = sum(record["own_peak_bytes"] <= record["budget_bytes"] for record in steps)
    predicted = [
        (_place(r), max(_ratio(r, "own_peak_bytes"), 1 / _ratio(r, "own_peak_bytes")))
        for r in steps
    ]
    reserved = [
        (_place(r), _ratio(r, "own_reserved_bytes")) for r in steps if "own_reserved_bytes" in r
    ]
    rows = [
        all_row("measured peak <= budget", fits, len(steps)),
        worst_row("allocated over predicted, or the inverse", _PREDICTED_TOLERANCE, predicted),
        worst_row("reserved over predicted", _RESERVED_TOLERANCE, reserved),
    ]
    for share, limit in _TIME_TARGETS.items():
        figures = [(r["model"], r["ratio"]) for r in steps if r["setting"] == share]
        rows.append(worst_row(f"time over eager's at {share} of the peak", limit, figures))
    return [*rows, *_offload_targets(records["offload"])]


def _offload_targets(records: Sequence[Record]) -> list[list[str]]:
    found = [record for record in records if "error" not in record]
    ours = [record for record in found if record["setting"] != SAVE_ON_CPU]
    peers = {r["model"]: r for r in found if r["setting"] == SAVE_ON_CPU}
    same = sum(r["host_bytes"] == r["predicted_host_bytes"] for r in ours)
    unheld = sum(r["num_host_waits"] <= r["eager_host_waits"] for r in ours)
    times = [(_place(r), abs(r["ratio"] / r["predicted_ratio"] - 1)) for r in ours]
    alone = [(_place(r), r["ratio"] / r["recompute_ratio"]) for r in ours if "recompute_ratio" in r]
    # Where the peer needs no less than ours.
    dominated = [
        (_place(r), r["ratio"] / peers[r["model"]]["ratio"])
        for r in ours
        if r["model"] in peers and r["own_peak_bytes"] <= peers[r["model"]]["own_peak_bytes"]
    ]
    return [
        all_row("host bytes as predicted", same, len(ours)),
        all_row("no wait of the host that eager has not", unheld, len(ours)),
        worst_row("time with moves, distance to the predicted", _OVERLAP_TOLERANCE, times),
        worst_row("time with moves over that of recomputation alone", 1.0, alone),
        worst_row("time over save_on_cpu's, at its peak or below", 1.0, dominated),
    ]


def _place(record: Record) -> str:
    return f"{record['model']} {record['setting']}".strip()


def _ratio(record: Record, key: str) -> float:
    return record[key] / record["predicted_peak_bytes"]


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f}"


def _correctness(records: Sequence[Record]) -> list[str]:
    columns = ["model", "gradients", "bitwise equal", "missing", "planned - eager", "eager - eager"]
    rows = [
        [
            r["model"],
            f"{r['num_gradients']}",
            f"{r['num_equal']}",
            f"{r['num_missing']}",
            f"{r['planned_difference']:.2e}",
            f"{r['eager_difference']:.2e}",
        ]
        for r in records
    ]
    return table(columns, rows)


def _steps(records: Sequence[Record]) -> list[str]:
    columns = [
        *("model", "of the peak", "budget, MiB", "predicted", "measured", "reserved"),
        *("eager", "time / eager's", "predicted", "planning, s"),
    ]
    rows = [
        [
            r["model"],
            r["setting"],
            _mib(r["budget_bytes"]),
            _mib(r["predicted_peak_bytes"]),
            _mib(r["own_peak_bytes"]),
            _mib(r.get("own_reserved_bytes", 0)),
            _mib(r["eager_peak_bytes"]),
            f"{r['ratio']:.3f}",
            f"{r['predicted_ratio']:.3f}",
            f"{r['planning_s']:.1f}",
        ]
        for r in records
    ]
    return table(columns, rows)


def _fused(records: Sequence[Record]) -> list[str]:
    columns = ["model", "of the peak", "groups", "kernels", "unfused", "compiling, s", "gradients"]
    rows = [
        [
            r["model"],
            r["setting"],
            f"{r['num_places']}",
            f"{r['num_kernels']}",
            f"{len(r['refusals'])}",
            f"{r['compile_s']:.1f}",
            f"{r['difference']:.1e}",
        ]
        for r in records
    ]
    return [*_steps(records), "", *table(columns, rows)]


def _offloads(records: Sequence[Record]) -> list[str]:
    """Ours, with the peer's rows below."""
    ours = [r for r in records if r["setting"] != SAVE_ON_CPU]
    columns = [
        *(
            "model",
            "of the peak",
            "moves",
            "recomputed",
            "host, MiB",
            "predicted",
            "time / eager's",
        ),
        *("predicted", "waits, ms", "by recomputation alone", "GB/s out, in", "duplex"),
    ]
    rows = [
        [
            r["model"],
            r["setting"],
            f"{r['num_moves']}",
            f"{r['num_recomputations']}",
            _mib(r["host_bytes"]),
            _mib(r["predicted_host_bytes"]),
            f"{r['ratio']:.3f}",
            f"{r['predicted_ratio']:.3f}",
            f"{r['predicted_waits_ms']:.1f}",
            f"{r['recompute_ratio']:.3f}" if "recompute_ratio" in r else "does not fit",
            f"{r['out_gb_per_s']:.1f}, {r['in_gb_per_s']:.1f}",
            f"{r['duplex']:.2f}",
        ]
        for r in ours
    ]
    peers = [r for r in records if r["setting"] == SAVE_ON_CPU]
    return [*table(columns, rows), "", *_steps(ours), "", *_peers(peers)]


def _peers(records: Sequence[Record]) -> list[str]:
    columns = ["model", "peer", "measured, MiB", "eager, MiB", "time / eager's"]
    rows = [
        [
            r["model"],
            r["setting"],
            _mib(r["own_peak_bytes"]),
            _mib(r["eager_peak_bytes"]),
            f"{r['ratio']:.3f}",
        ]
        for r in records
    ]
    return table(columns, rows)


def _costs(records: Sequence[Record]) -> list[str]:
    columns = ["model", "measured, ms", "estimated / measured", "largest ops: estimated / measured"]
    rows = []
    for r in records:
        ops = [f"{name} {pair[1] / (pair[0] or 1e-9):.2f}" for name, pair in r["by_op"].items()]
        ratio = r["estimated_ms"] / (r["measured_ms"] or 1e-9)
        rows.append([r["model"], f"{r['measured_ms']:.1f}", f"{ratio:.2f}", ", ".join(ops[:6])])
    return table(columns, rows)


def _batches(records: Sequence[Record]) -> list[str]:
    columns = ["model", "cap", "eager, rows", "planned, rows", "eager, rows/s", "planned, rows/s"]
    rows = [
        [
            r["model"],
            r["setting"],
            f"{r['eager']['rows']}",
            f"{r['planned']['rows']}",
            f"{r['eager']['rows_per_s']:.1f}",
            f"{r['planned']['rows_per_s']:.1f}",
        ]
        for r in records
    ]
    return table(columns, rows)


_TABLES: Mapping[str, Callable[[Sequence[Record]], list[str]]] = {
    "correctness": _correctness,
    "step": _steps,
    "fused": _fused,
    "peers": _peers,
    "offload": _offloads,
    "costs": _costs,
    "batch": _batches,
}
