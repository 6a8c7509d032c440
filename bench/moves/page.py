"""The page of `bench.offload`: targets, and a table for each machine and for measured models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.command import Record
from bench.machine import machine_text
from bench.pages import Column, Goal, Target, filled, in_mb, judged, records_table, targets

_MOST_TIME = 1.25
_REACH = {"resnet50": 5, "resnet101": 6}
TIGHT = 1.2
"""The multiple of the least peak without moves at which tight plans are compared."""


def page(records: Sequence[Record]) -> list[str]:
    """The targets, and a table for each machine and for the measured models."""
    machines = [machine_text(each) for each in {r["command"]: r for r in records}.values()]
    simulated = [record for record in records if record["kind"] == "simulated"]
    tables: list[str] = []
    for machine in dict.fromkeys(record["machine_name"] for record in simulated):
        tables += [*_simulated_table([r for r in simulated if r["machine_name"] == machine]), ""]
    for kind, (title, text, columns) in _KINDS.items():
        found = [record for record in records if record["kind"] == kind]
        if found:
            tables += [f"## {title}", "", text, "", *records_table(columns, found), ""]
    rows = [*judged(_GOALS, records), *_batch_rows(records), *judged(_BATCH_GOALS, records)]
    return filled("offload", machines="\n\n".join(machines), targets=targets(rows), tables=tables)


# --- targets ----------------------------------------------------------------------------------


def _of_kind(kind: str) -> Callable[[Record], bool]:
    return lambda r: r["kind"] == kind and not r.get("everything")


def _planned_for(machine: str, share: float = 0.0) -> Callable[[Record], bool]:
    """Whether a record is of a plan for a machine, at a share of the peak if one is given."""
    return lambda r: (
        _of_kind("simulated")(r)
        and r["machine_name"] == machine
        and (not share or abs(r["share"] - share) < 1e-3)
    )


def _beside(counts: Callable[[Record], bool]) -> Callable[[Record], bool]:
    """The same, where recomputation alone fits as well."""
    return lambda r: counts(r) and r["recompute_ratio"] is not None


def _over_recomputation(r: Record) -> float:
    return r["ratio"] / r["recompute_ratio"]


def _is_tight(r: Record) -> bool:
    return _planned_for("rtx4090")(r) and abs(r["share"] / r["least_share"] - TIGHT) < 1e-2


def _planning_ratio(r: Record) -> float:
    with_moves_s = r["prepare_with_moves_s"] + r["plan_with_moves_s"]
    return with_moves_s / (r["prepare_s"] + r["plan_s"])


def _planned_ratio(r: Record) -> float:
    """The plan's own prediction, over that of the plan without moves."""
    base_ms = r["predicted_ms"] / r["predicted_ratio"] / r["ops_factor"]
    return r["planned_ms"] / base_ms


def _distance(figure: float, predicted: float) -> float:
    return abs(figure / predicted - 1)


_SIMULATED_ONES, _MEASURED_ONES = _of_kind("simulated"), _of_kind("measured")
_PEERS, _BATCHES = _of_kind("peer"), _of_kind("batch")
_AT, _NEAR = "{machine_name} at {share:.3f}", "{machine_name} at {share:.2f}"
_MODEL_AT = "{model} at {share:.2f}"
_GOALS = (
    Goal("time at half of the peak, rtx4090", 1.005, lambda r: r["ratio"],
         _planned_for("rtx4090", 0.5), "rtx4090 at 0.5"),
    Goal("time at a tenth, rtx4090", 1.03, lambda r: r["ratio"],
         _planned_for("rtx4090", 0.1), "rtx4090 at 0.1"),
    Goal("time over recomputation's at 0.3, h100", 0.94, _over_recomputation,
         _beside(_planned_for("h100", 0.3)), _AT),
    Goal("the same at 0.1, h100", 0.88, _over_recomputation,
         _beside(_planned_for("h100", 0.1)), _AT),
    Goal("the same at any budget", 1.0, _over_recomputation, _beside(_SIMULATED_ONES), _AT),
    Goal("the same at 1.2 x the least peak, rtx4090", 0.6, _over_recomputation,
         _beside(_is_tight), _AT),
    Goal("distance to the bound, 0.5 to 0.15 of the peak", 0.03,
         lambda r: r["ratio"] - r["bound_ratio"],
         lambda r: _SIMULATED_ONES(r) and 0.149 <= r["share"] <= 0.501, _NEAR),
    Goal("seconds to plan, over those without moves", 2.0, _planning_ratio,
         _SIMULATED_ONES, _NEAR),
    Goal("time over that of moving everything, at its peak", 1.0,
         lambda r: r["ratio"] / r["everything_ratio"],
         lambda r: r.get("everything"), "{machine_name}"),
    Goal("gradients bitwise eager's", None, lambda r: r["is_bitwise"], _MEASURED_ONES),
    Goal("gradients bitwise those without moves", None,
         lambda r: r.get("is_bitwise_unmoved", r["is_bitwise"]), _MEASURED_ONES),
    Goal("measured peak within the budget", None,
         lambda r: r["measured_peak_bytes"] <= r["budget_bytes"], _MEASURED_ONES),
    Goal("bytes on the disk as predicted", None,
         lambda r: r["measured_host_bytes"] == r["predicted_host_bytes"], _MEASURED_ONES),
    Goal("measured peak, distance to the predicted", 0.01,
         lambda r: _distance(r["measured_peak_bytes"], r["predicted_peak_bytes"]),
         _MEASURED_ONES, _MODEL_AT),
    Goal("measured time over the plan's without moves, distance to predicted", 0.08,
         lambda r: _distance(r["measured_ratio"], r["predicted_ratio"]),
         _MEASURED_ONES, _MODEL_AT),
    Goal("the same, to the time at the rates that were planned with", 0.08,
         lambda r: _distance(r["measured_ratio"], _planned_ratio(r)),
         lambda r: _MEASURED_ONES(r) and "ops_factor" in r, _MODEL_AT),
    Goal("gradients beside peers bitwise eager's", None, lambda r: r["is_bitwise"], _PEERS),
    Goal("peak no higher than the peer's, or than our least", None,
         lambda r: r["own_bytes"] <= max(r["peer_bytes"], r["least_bytes"]), _PEERS),
    Goal("time over the peer's at its peak", 1.0, lambda r: r["over_peer"],
         lambda r: _PEERS(r) and r["peer_bytes"] >= r["least_bytes"], "{model}, {peer}"),
)  # fmt: skip


def _batch_rows(records: Sequence[Record]) -> Iterator[Target]:
    """Targets that are lower limits."""
    for name, reach in _REACH.items():
        own = [r for r in records if _BATCHES(r) and r["model"] == name]
        times = [r["largest"] / r["rows"] for r in own]
        figure = ", ".join(f"{each:.3g} {_where(r)}" for r, each in zip(own, times, strict=True))
        what = f"{name}: largest batch over eager's, in its memory"
        yield Target(what, f">= {reach}", figure, "", min(times) >= reach if times else None)


_BATCH_GOALS = (
    Goal("time a sample over eager's there", _MOST_TIME, lambda r: r["time_ratio"], _BATCHES,
         lambda r: f"{r['model']} {_where(r)}"),
    Goal("measured peak of the largest batch within eager's memory", None,
         lambda r: r["measured_peak_bytes"] + r["batch_bytes"] <= r["memory_bytes"],
         lambda r: _BATCHES(r) and "measured_peak_bytes" in r),
)  # fmt: skip


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
