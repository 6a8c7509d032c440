"""Plan files: a plan as readable JSON, one op or run a line, and back.

The text holds everything in a `PlanRecord` but its graph. A plan that has been read explains
itself, and `RockmateModule` runs it on a model whose captured step is the same. Nothing here needs
a solver.

The text is checked:

* a digest over everything but the schedule detects a damaged file;
* the schedule may be edited. It is replayed, and refused if it reads a value that does not exist,
  omits an op that the step needs, runs a random op out of order or recomputes an op that may run
  only once, or has a higher peak than the plan promises. The live bytes are for readers, and
  computed anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from math import inf
from typing import Any

from rockmate.costs.cost import Cost, Costs, Link
from rockmate.errors import PlanFileError
from rockmate.graph.snapshot import (
    SnapshotBlock,
    SnapshotChain,
    SnapshotOp,
    SnapshotStorage,
    StepSnapshot,
    StorageKind,
    digest,
)
from rockmate.graph.step_options import StepOptions
from rockmate.plan.faults import fault_of
from rockmate.plan.record import ChunkingNote, ChunkingNotes, PlanRecord
from rockmate.plan.residency import Residency
from rockmate.schedule.move import Fetch, Move
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.schedule import Schedule

_FORMAT = "rockmate plan"
_VERSION = 1
# A run of the schedule, as `Schedule.rows` writes it.
_ROW = re.compile(r"(forward|backward) +(\d+) (\S+)( again)?( in-place)?")
# Keys that the digest does not cover.
_EDITABLE = ("schedule", "live_bytes", "digest")
# Fields of `PlanRecord` that are written under their own names.
_PLAIN_FIELDS = (
    "strategy",
    "budget_bytes",
    "predicted_peak_bytes",
    "predicted_ms",
    "baseline_peak_bytes",
    "baseline_ms",
    "minimum_peak_bytes",
    "num_unproved_blocks",
    "machine",
)
# The same for fields that files of earlier releases lack; those have the default.
_OPTIONAL_FIELDS = ("gap_tolerance", "is_cut_short")


def plan_text(plan: PlanRecord) -> str:
    """The plan as text; `read_plan` reads it."""
    snapshot = plan.snapshot
    content: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "torch": snapshot.torch_version,
        "call": snapshot.call,
        "fingerprint": {"graph": snapshot.fingerprint, "call": snapshot.call_fingerprint},
        "options": plan.options.to_json(),
        **{name: getattr(plan, name) for name in (*_PLAIN_FIELDS, *_OPTIONAL_FIELDS)},
        "lower_bound_ms": plan.lower_bound_ms,
        "loss_block": [plan.loss_block.module, plan.loss_block.text],
        **_bitwise_content(plan),
        "feed_forward": [[note.module, note.text] for note in plan.feed_forward],
        "schedule": plan.schedule.rows(snapshot.names),
        "live_bytes": plan.simulation.live_bytes,
        **_moves_content(plan),
        "inputs": snapshot.inputs,
        "outputs": snapshot.outputs,
        "updates": snapshot.updates,
        "blocks": [_row(block) for block in plan.chain.blocks],
        "carried": plan.chain.carried,
        "storages": [_row(storage) for storage in snapshot.storages],
        "ops": [_row(op) for op in snapshot.ops],
        "costs": [
            [first.time_ms, first.overhead_bytes, recompute.time_ms, recompute.overhead_bytes]
            for first, recompute in zip(plan.costs.first, plan.costs.recompute, strict=True)
        ],
        "num_distinct_calls": plan.costs.num_distinct,
    }
    content["digest"] = _digest(content)
    entries = (f"{json.dumps(key)}: {_value_text(value)}" for key, value in content.items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def read_plan(text: str, *, origin: str = "the text") -> PlanRecord:
    """The plan that `plan_text` wrote.

    Args:
        text: the text that it wrote; its schedule may be edited.
        origin: name of the text in errors.

    Raises:
        PlanFileError: the text is no plan, is damaged or of another format version, or its schedule
            is invalid or has a higher peak than the plan promises.
    """
    content = _content(text, origin)
    try:
        plan = _plan(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanFileError(
            f"{origin} has no plan that can be read ({type(error).__name__}: {error}). "
            "Save the plan again."
        ) from error
    _check_schedule_rows(plan, content["schedule"], origin)
    return _replayed(plan, origin)


def _bitwise_content(plan: PlanRecord) -> dict[str, Any]:
    """The time without chunks, null if no schedule fits; nothing for a plan without chunks."""
    if plan.bitwise_ms is None:
        return {}
    return {"bitwise_ms": plan.bitwise_ms if plan.bitwise_ms < inf else None}


def _bitwise_ms(content: Mapping[str, Any]) -> float | None:
    if "bitwise_ms" not in content:
        return None
    return inf if content["bitwise_ms"] is None else content["bitwise_ms"]


def _moves_content(plan: PlanRecord) -> dict[str, Any]:
    """What moves, where to, and at which rates; nothing for a plan without `offload`."""
    if plan.offload is None:
        return {}
    return {
        "offload": plan.offload.text,
        "host_budget": plan.offload.host_bytes,
        **({"with_trained": True} if plan.offload.with_trained else {}),
        "link": None if plan.costs.link is None else asdict(plan.costs.link),
        "moves": [_row(move) for move in plan.schedule.moves],
        "fetches": [_row(fetch) for fetch in plan.schedule.fetches],
    }


# --- text -------------------------------------------------------------------------------------


def _value_text(value: Any) -> str:
    """JSON with an entry a line in lists of lines, rows and objects."""
    if isinstance(value, list | tuple) and any(
        isinstance(item, str | list | tuple | dict) for item in value
    ):
        return "[\n" + ",\n".join(f" {json.dumps(item, allow_nan=False)}" for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def _row(value: SnapshotStorage | SnapshotOp | SnapshotBlock | Move | Fetch) -> dict[str, Any]:
    """A JSON object without the fields that have their default value."""
    named = ((field, getattr(value, field.name)) for field in fields(value))
    return {field.name: item for field, item in named if item != field.default}


def _digest(content: Mapping[str, Any]) -> str:
    return digest({key: value for key, value in content.items() if key not in _EDITABLE})


def _content(text: str, origin: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanFileError(
            f"{origin} is no JSON ({error}): it is cut off or damaged, or no plan. "
            "Save the plan again."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise PlanFileError(
            f'{origin} is JSON but no plan: its "format" is not {_FORMAT!r}. '
            "Give a file that Plan.save wrote."
        )
    version = content.get("version")
    if version != _VERSION:
        raise PlanFileError(
            f"{origin} has format version {version!r}, and this release of rockmate reads "
            f"{_VERSION}. Use the release that wrote it."
        )
    if content.get("digest") != _digest(content):
        raise PlanFileError(
            f"{origin} has been damaged or edited outside its schedule: its digest does not fit "
            "its content. Save the plan again."
        )
    if not isinstance(content.get("schedule"), list):
        raise PlanFileError(f"{origin} has no schedule. Save the plan again.")
    return content


# --- content -> plan --------------------------------------------------------------------------


def _plan(content: Mapping[str, Any]) -> PlanRecord:
    options = StepOptions.from_json(content["options"])
    snapshot = StepSnapshot(
        torch_version=content["torch"],
        call=content["call"],
        inputs=tuple((what, tensor) for what, tensor in content["inputs"]),
        outputs=tuple((what, storage) for what, storage in content["outputs"]),
        updates=tuple(content["updates"]),
        storages=tuple(
            _built(SnapshotStorage, row, kind=StorageKind) for row in content["storages"]
        ),
        ops=tuple(_built(SnapshotOp, row) for row in content["ops"]),
        num_in_flight=options.in_flight,
    )
    moves = tuple(_built(Move, row) for row in content.get("moves", ()))
    fetches = tuple(_built(Fetch, row) for row in content.get("fetches", ()))
    schedule = replace(_schedule(content["schedule"]), moves=moves, fetches=fetches)
    rows = [
        (Cost(time_ms=a, overhead_bytes=b), Cost(time_ms=c, overhead_bytes=d))
        for a, b, c, d in content["costs"]
    ]
    costs = Costs(
        first=tuple(row[0] for row in rows),
        recompute=tuple(row[1] for row in rows),
        num_distinct=content["num_distinct_calls"],
        link=Link(**content["link"]) if content.get("link") else None,
    )
    if len(rows) != len(snapshot.ops):
        raise ValueError(f"{len(rows)} costs for {len(snapshot.ops)} ops")
    module, text = content.get("loss_block", ("", ""))
    fault = fault_of(snapshot, schedule)
    if fault:
        raise ValueError(fault)
    return PlanRecord(
        **{name: content[name] for name in _PLAIN_FIELDS},
        **{name: content[name] for name in _OPTIONAL_FIELDS if name in content},
        bound=content["lower_bound_ms"],
        schedule=schedule,
        simulation=Residency(snapshot, schedule).simulation(costs),
        costs=costs,
        snapshot=snapshot,
        chain=SnapshotChain(
            blocks=tuple(_built(SnapshotBlock, row) for row in content["blocks"]),
            carried=tuple(content["carried"]),
        ),
        options=options,
        offload=_offload(content),
        find_notes=partial(
            ChunkingNotes,
            loss_block=ChunkingNote(module=module, text=text),
            feed_forward=tuple(
                ChunkingNote(module=module, text=text)
                for module, text in content.get("feed_forward", ())
            ),
            bitwise_ms=_bitwise_ms(content),
        ),
    )


def _offload(content: Mapping[str, Any]) -> OffloadRequest | None:
    if "offload" not in content:
        return None
    kind, _, folder = content["offload"].partition(":")
    if kind not in ("host", "disk"):
        raise ValueError(f"offload is {content['offload']!r}")
    with_trained = bool(content.get("with_trained"))
    return OffloadRequest(kind, folder, content["host_budget"], with_trained)


def _built(
    cls: Callable[..., Any], row: Mapping[str, Any], **converters: Callable[[Any], Any]
) -> Any:
    """A dataclass from a JSON object: lists become tuples."""
    values: dict[str, Any] = {}
    for name, value in row.items():
        plain = tuple(value) if isinstance(value, list) else value
        values[name] = converters[name](plain) if name in converters else plain
    return cls(**values)


def _schedule(rows: list[Any]) -> Schedule:
    halves = []
    for number, row in enumerate(rows):
        match = _ROW.fullmatch(row) if isinstance(row, str) else None
        if match is None:
            raise ValueError(
                f"step {number} of the schedule reads {row!r}, not like 'forward 3 addmm_1' with "
                "' again' and ' in-place' where they hold"
            )
        halves.append(match[1])
    if halves != sorted(halves, reverse=True):
        raise ValueError("the schedule has a step of the forward after one of the backward")
    words = [row.split() for row in rows]
    return Schedule(
        tuple(int(each[1]) for each in words if each[0] == "forward"),
        tuple(int(each[1]) for each in words if each[0] == "backward"),
        frozenset(position for position, each in enumerate(words) if each[-1] == "in-place"),
    )


def _check_schedule_rows(plan: PlanRecord, rows: list[str], origin: str) -> None:
    """Raises `PlanFileError` if a row names another op than its index, or lacks a mark."""
    written = plan.schedule.rows(plan.snapshot.names)
    for number, (row, expected) in enumerate(zip(rows, written, strict=True)):
        if row.split() != expected.split():
            raise PlanFileError(
                f"step {number} of the schedule in {origin} reads {row!r} and would have to read "
                f"{expected!r}."
            )


def _replayed(plan: PlanRecord, origin: str) -> PlanRecord:
    """The plan with the peak and the time of its schedule."""
    found = plan.simulation
    if found.peak_bytes > plan.predicted_peak_bytes:
        raise PlanFileError(
            f"the schedule in {origin} has a peak of {found.peak_bytes:,} bytes, at step "
            f"{found.peak_position}, above the {plan.predicted_peak_bytes:,} bytes that the plan "
            "promises."
        )
    return replace(plan, predicted_peak_bytes=found.peak_bytes, predicted_ms=found.time_ms)
