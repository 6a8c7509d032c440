"""The page of `bench.offload`: targets, and a table for each machine and for measured models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.command import Record
from bench.machine import machine_text
from bench.pages import Column, all_row, in_mb, records_table, targets, worst_row

_MOST_TIME = 1.25
_REACH = {"resnet50": 5, "resnet101": 6}
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
    for kind, (title, text, columns) in _KINDS.items():
        found = [record for record in records if record["kind"] == kind]
        if found:
            lines += ["", f"## {title}", "", text, "", *records_table(columns, found)]
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
    yield from _peer_targets([r for r in records if r["kind"] == "peer"])
    yield from _batch_targets([r for r in records if r["kind"] == "batch"])


def _simulated_targets(planned: Sequence[Record]) -> Iterator[list[str]]:
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
    yield worst_row(
        "time at half of the peak, rtx4090",
        1.005,
        [("rtx4090 at 0.5", r["ratio"]) for r in at("rtx4090", 0.5)],
    )
    yield worst_row(
        "time at a tenth, rtx4090",
        1.03,
        [("rtx4090 at 0.1", r["ratio"]) for r in at("rtx4090", 0.1)],
    )
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


def _peer_targets(found: Sequence[Record]) -> Iterator[list[str]]:
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


def _batch_targets(found: Sequence[Record]) -> Iterator[list[str]]:
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


# --- tables -----------------------------------------------------------------------------------


def _where(record: Record) -> str:
    return f"on {record['machine_name']}" if record["machine_name"] else "measured here"


def _planned(form: str) -> Callable[[Record], str]:
    """A cell of a plan, empty where everything is moved."""
    return lambda record: "" if record.get("everything") else form.format_map(record)


def _alone(record: Record) -> str:
    if record.get("everything"):
        return f"{record['everything_ratio']:.3f} by moving everything"
    ratio = record["recompute_ratio"]
    return "does not fit" if ratio is None else f"{ratio:.3f}"


_SIMULATED: tuple[Column, ...] = (
    ("of the peak", "{share:.3f}"),
    ("recomputation", _alone),
    ("with moves", "{ratio:.3f}"),
    ("bound", _planned("{bound_ratio:.3f}")),
    ("moves", _planned("{num_moves}")),
    ("recomputed", _planned("{num_recomputations}")),
    ("host GiB", lambda r: f"{r['host_bytes'] / 2**30:.1f}"),
    ("waits", _planned("{waits_ratio:.3f}")),
    ("s to plan", _planned("{plan_s:.1f} + {plan_with_moves_s:.1f}")),
)
_MOVES: tuple[Column, ...] = (("moves", "{num_moves}"), ("recomputed", "{num_recomputations}"))
_KINDS: Mapping[str, tuple[str, str, Sequence[Column]]] = {
    "measured": (
        "A disk on this machine",
        "Times are over the plan at the whole peak, which moves and recomputes nothing. Predicted "
        "times are at the speeds of the machine and its disk at that time; see "
        "`bench/moves/measured.py`.",
        (
            ("model", "{model}"),
            ("of the peak", "{share:.2f}"),
            *_MOVES,
            ("peak, MB", in_mb("measured_peak_bytes")),
            (
                "over predicted",
                lambda r: f"{r['measured_peak_bytes'] / r['predicted_peak_bytes']:.4f}",
            ),
            ("disk, MB", in_mb("measured_host_bytes")),
            ("predicted time", "{predicted_ratio:.3f}"),
            ("measured time", "{measured_ratio:.3f}"),
            ("GB/s out, in", "{out_gb_per_s:.1f}, {in_gb_per_s:.1f}"),
            ("gradients", lambda r: "bitwise" if r["is_bitwise"] else "**differ**"),
        ),
    ),
    "peer": (
        "Peers with the same disk",
        "Times are over eager's. All use the same disk, in turn; see `bench/moves/peers.py`.",
        (
            ("model", "{model}"),
            ("peer", "{peer}"),
            ("its peak, MB", in_mb("peer_bytes")),
            ("our peak, MB", in_mb("own_bytes")),
            ("its time", "{peer_ratio:.3f}"),
            ("our time", "{ratio:.3f}"),
            ("ours over its", "{over_peer:.3f}"),
            *_MOVES,
        ),
    ),
    "batch": (
        "The largest batch",
        f"The largest batch whose step takes at most {_MOST_TIME} of eager's time a sample, in the "
        "memory of eager's activations and batch. Batches are multiples of eager's.",
        (
            ("model", "{model}"),
            ("where", _where),
            ("pixels", "{pixels}"),
            ("eager's batch", "{rows}"),
            ("its memory, MB", in_mb("memory_bytes")),
            ("by recomputation alone", "{largest_without_moves}"),
            ("with moves", "{largest}"),
            ("time a sample", "{time_ratio:.3f}"),
            *_MOVES,
            ("moved away, MB", in_mb("host_bytes")),
        ),
    ),
}
"""Kind of record to the title, the text and the columns of its table."""


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
    return [title, "", text, "", *records_table(_SIMULATED, records)]
