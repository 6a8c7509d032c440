"""The page of `bench.cuda`: the targets, then a table for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.machine import hardware_text, versions_text
from bench.pages import Column, all_row, records_table, targets, worst_row

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
    for part in _COLUMNS:
        done = [record for record in records[part] if "error" not in record]
        failed = [record for record in records[part] if "error" in record]
        lines += ["", f"## {part.capitalize()}", ""]
        whole = [record for record in done if "skipped" not in record]
        lines += [line for each in _tables(part, whole) for line in (*each, "")][:-1]
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


def _mib(key: str) -> Callable[[Record], str]:
    return lambda record: f"{record.get(key, 0) / 2**20:,.0f}"


def _batch_column(name: str, key: str, form: str) -> Callable[[Record], str]:
    return lambda record: format(record[name][key], form)


_PLACE: tuple[Column, ...] = (("model", "{model}"), ("of the peak", "{setting}"))
_STEP: tuple[Column, ...] = (
    *_PLACE,
    ("budget, MiB", _mib("budget_bytes")),
    ("predicted", _mib("predicted_peak_bytes")),
    ("measured", _mib("own_peak_bytes")),
    ("reserved", _mib("own_reserved_bytes")),
    ("eager", _mib("eager_peak_bytes")),
    ("time / eager's", "{ratio:.3f}"),
    ("predicted", "{predicted_ratio:.3f}"),
    ("planning, s", "{planning_s:.1f}"),
)
_COLUMNS: Mapping[str, Sequence[Sequence[Column]]] = {
    "correctness": [
        (
            ("model", "{model}"),
            ("gradients", "{num_gradients}"),
            ("bitwise equal", "{num_equal}"),
            ("missing", "{num_missing}"),
            ("planned - eager", "{planned_difference:.2e}"),
            ("eager - eager", "{eager_difference:.2e}"),
        )
    ],
    "step": [_STEP],
    "fused": [
        _STEP,
        (
            *_PLACE,
            ("groups", "{num_places}"),
            ("kernels", "{num_kernels}"),
            ("unfused", lambda r: str(len(r["refusals"]))),
            ("compiling, s", "{compile_s:.1f}"),
            ("gradients", "{difference:.1e}"),
        ),
    ],
    "offload": [
        (
            *_PLACE,
            ("moves", "{num_moves}"),
            ("recomputed", "{num_recomputations}"),
            ("host, MiB", _mib("host_bytes")),
            ("predicted", _mib("predicted_host_bytes")),
            ("time / eager's", "{ratio:.3f}"),
            ("predicted", "{predicted_ratio:.3f}"),
            ("waits, ms", "{predicted_waits_ms:.1f}"),
            (
                "by recomputation alone",
                lambda r: (
                    f"{r['recompute_ratio']:.3f}" if "recompute_ratio" in r else "does not fit"
                ),
            ),
            ("GB/s out, in", "{out_gb_per_s:.1f}, {in_gb_per_s:.1f}"),
            ("duplex", "{duplex:.2f}"),
        ),
        _STEP,
    ],
    "peers": [
        (
            ("model", "{model}"),
            ("peer", "{setting}"),
            ("measured, MiB", _mib("own_peak_bytes")),
            ("eager, MiB", _mib("eager_peak_bytes")),
            ("time / eager's", "{ratio:.3f}"),
        )
    ],
    "costs": [
        (
            ("model", "{model}"),
            ("measured, ms", "{measured_ms:.1f}"),
            (
                "estimated / measured",
                lambda r: f"{r['estimated_ms'] / (r['measured_ms'] or 1e-9):.2f}",
            ),
            (
                "largest ops: estimated / measured",
                lambda r: ", ".join(
                    f"{name} {pair[1] / (pair[0] or 1e-9):.2f}"
                    for name, pair in list(r["by_op"].items())[:6]
                ),
            ),
        )
    ],
    "batch": [
        (
            ("model", "{model}"),
            ("cap", "{setting}"),
            *(
                (f"{name}, {title}", _batch_column(name, key, form))
                for title, key, form in (("rows", "rows", ""), ("rows/s", "rows_per_s", ".1f"))
                for name in ("eager", "planned")
            ),
        )
    ],
}
"""The tables of each part."""


def _tables(part: str, records: Sequence[Record]) -> Iterator[list[str]]:
    """The tables of a part; other ways to offload have those of peers."""
    ours = [record for record in records if record["setting"] != SAVE_ON_CPU]
    for columns in _COLUMNS[part]:
        yield records_table(columns, ours)
    if part == "offload":
        others = [record for record in records if record["setting"] == SAVE_ON_CPU]
        yield records_table(_COLUMNS["peers"][0], others)
