"""The page of `bench.cuda`: the targets, then a table for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.machine import hardware_text, versions_text
from bench.pages import Column, Goal, filled, judged, records_table, targets

Record = Mapping[str, Any]
SAVE_ON_CPU = "save_on_cpu"
"""Setting of the peer in the part with moves."""


def page(records: Mapping[str, Sequence[Record]], machine: Record) -> str:
    """The page of finished cases."""
    parts: list[str] = []
    for part in _COLUMNS:
        whole = [r for r in records[part] if not {"error", "skipped"} & r.keys()]
        failed = [record for record in records[part] if "error" in record]
        parts += [f"## {part.capitalize()}", ""]
        parts += [line for each in _tables(part, whole) for line in (*each, "")]
        parts += [f"{_PLACE.format_map(record)}: {record['error']}\n" for record in failed]
    text = filled(
        "cuda",
        targets=targets(judged(_GOALS, _judgeable(records))),
        parts=parts,
        machine=machine,
        hardware=hardware_text(machine, device="cuda" if machine["gpu"] else "cpu"),
        versions=versions_text(machine),
    )
    return "\n".join(text) + "\n"


def _judgeable(records: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    """The steps of all parts, each with its part; those with moves with the time of the peer."""
    steps = [
        {**record, "part": part}
        for part in ("step", "fused", "offload")
        for record in records[part]
        if "error" not in record and "budget_bytes" in record
    ]
    peers = {r["model"]: r for r in records["offload"] if r["setting"] == SAVE_ON_CPU}
    for step in steps:
        peer = peers.get(step["model"], {})
        # Where the peer needs no less than ours.
        if step["part"] == "offload" and step["own_peak_bytes"] <= peer.get("own_peak_bytes", 0):
            step["peer_ratio"] = peer["ratio"]
    return steps


def _over_predicted(key: str) -> Callable[[Record], float]:
    return lambda r: r[key] / r["predicted_peak_bytes"]


def _either_way(r: Record) -> float:
    ratio = _over_predicted("own_peak_bytes")(r)
    return max(ratio, 1 / ratio)


def _at(share: str) -> Callable[[Record], bool]:
    return lambda r: r["setting"] == share


def _moves(r: Record) -> bool:
    return r["part"] == "offload"


_PLACE = "{model} {setting}"
_GOALS = (
    Goal("measured peak <= budget", None, lambda r: r["own_peak_bytes"] <= r["budget_bytes"],
         lambda _: True),
    Goal("allocated over predicted, or the inverse", 1.01, _either_way, lambda _: True, _PLACE),
    Goal("reserved over predicted", 1.05, _over_predicted("own_reserved_bytes"),
         lambda r: "own_reserved_bytes" in r, _PLACE),
    *(
        Goal(f"time over eager's at {share} of the peak", limit, lambda r: r["ratio"], _at(share),
             "{model}")
        for share, limit in (("1.0", 1.02), ("0.5", 1.10), ("0.25", 1.20))
    ),
    Goal("host bytes as predicted", None,
         lambda r: r["host_bytes"] == r["predicted_host_bytes"], _moves),
    Goal("no wait of the host that eager has not", None,
         lambda r: r["num_host_waits"] <= r["eager_host_waits"], _moves),
    Goal("time with moves, distance to the predicted", 0.05,
         lambda r: abs(r["ratio"] / r["predicted_ratio"] - 1), _moves, _PLACE),
    Goal("time with moves over that of recomputation alone", 1.0,
         lambda r: r["ratio"] / r["recompute_ratio"],
         lambda r: _moves(r) and "recompute_ratio" in r, _PLACE),
    Goal("time over save_on_cpu's, at its peak or below", 1.0,
         lambda r: r["ratio"] / r["peer_ratio"], lambda r: "peer_ratio" in r, _PLACE),
)  # fmt: skip


def _mib(key: str) -> Callable[[Record], str]:
    return lambda record: f"{record.get(key, 0) / 2**20:,.0f}"


def _batch_column(name: str, key: str, form: str) -> Callable[[Record], str]:
    return lambda record: format(record[name][key], form)


_FIRST: tuple[Column, ...] = (("model", "{model}"), ("of the peak", "{setting}"))
_STEP: tuple[Column, ...] = (
    *_FIRST,
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
            *_FIRST,
            ("groups", "{num_places}"),
            ("kernels", "{num_kernels}"),
            ("unfused", lambda r: str(len(r["refusals"]))),
            ("compiling, s", "{compile_s:.1f}"),
            ("gradients", "{difference:.1e}"),
        ),
    ],
    "offload": [
        (
            *_FIRST,
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
