"""Whether a schedule is valid for a step: a replay of its own, run by run.

It shares no code with liveness, the simulator or the search.
"""

from __future__ import annotations

from rockmate.graph.snapshot import SnapshotOp, StepSnapshot, StorageKind
from rockmate.schedule.move import MoveError, MoveWalk, broken_fetch
from rockmate.schedule.schedule import Schedule


def fault_of(snapshot: StepSnapshot, schedule: Schedule) -> str:
    """The first fault of a schedule, in words; empty if it computes the step.

    Each run reads values that exist, each needed op runs, no op runs in the wrong half or more
    often than it may, random ops draw in eager's order, marks are kept, and moves and fetches fit.
    """
    kinds = [storage.kind for storage in snapshot.storages]
    made = {index for index, kind in enumerate(kinds) if kind.is_static}
    seen: set[int] = set()
    num_ops = len(snapshot.ops)
    for position, index in enumerate(schedule.steps):
        step = f"step {position} of the schedule runs"
        if index >= num_ops:
            return f"{step} op {index}, and the last is op {num_ops - 1}"
        op = snapshot.ops[index]
        if position < len(schedule.forward) and op.phase != "forward":
            return f"{step} {op.name} in the forward, which is an op of the backward"
        if position >= len(schedule.forward) and op.phase == "forward" and index not in seen:
            return f"{step} {op.name} in the backward first, which is an op of the forward"
        if index in seen and not op.is_recomputable:
            return f"{step} {op.name} again, which can run only once"
        seen.add(index)
        if position == len(schedule.forward):
            made |= {each for each, kind in enumerate(kinds) if kind is StorageKind.TANGENT}
        for missing in (storage for storage in op.reads if storage not in made):
            name = snapshot.storages[missing].name
            return f"step {position} ({op.name}) reads {name} before it is made"
        made.update(op.writes)
    for index, op in enumerate(snapshot.ops):
        if index not in seen and _is_needed(snapshot, op):
            return f"the schedule never runs {op.name}, whose result the step returns or hands over"
    broken = broken_mark(snapshot, schedule) or broken_move(snapshot, schedule)
    if broken:
        return broken
    drawn = [index for index in dict.fromkeys(schedule.steps) if snapshot.ops[index].is_random]
    is_draw_missing = any(
        op.is_random and index not in seen for index, op in enumerate(snapshot.ops)
    )
    if is_draw_missing or drawn != sorted(drawn):
        return "the schedule draws random numbers in another order than the model"
    return ""


def _is_needed(snapshot: StepSnapshot, op: SnapshotOp) -> bool:
    """Whether the step returns a result of the op, copies it to a buffer or hands it to `.grad`."""
    return bool(op.final_gradients) or any(
        snapshot.storages[storage].kind.is_result or storage in snapshot.updates
        for storage in op.writes
    )


def broken_mark(snapshot: StepSnapshot, schedule: Schedule) -> str:
    """The first mark that a schedule does not keep, in words; empty if it keeps all.

    * The op of a saved value runs once, and if it is one of the forward, in the forward.
    * A value to be recomputed is read in the backward only after its op has run there.
    """
    marks = [storage.mark for storage in snapshot.storages]
    if not any(marks):
        return ""
    num_runs = [0] * len(snapshot.ops)
    made_in_forward = [False] * len(snapshot.storages)
    for position, index in enumerate(schedule.steps):
        op, is_forward = snapshot.ops[index], position < len(schedule.forward)
        step = f"step {position} of the schedule, {op.name},"
        if not is_forward:
            for storage in op.reads:
                if marks[storage] == "recompute" and made_in_forward[storage]:
                    return (
                        f"{step} reads {_named(snapshot, storage)} as the forward made it, and it "
                        "is marked to be recomputed"
                    )
        num_runs[index] += 1
        for storage in op.writes:
            made_in_forward[storage] = is_forward
            if marks[storage] == "save" and num_runs[index] > 1:
                return f"{step} runs again, and {_named(snapshot, storage)} is marked to be saved"
            if marks[storage] == "save" and op.phase == "forward" and not is_forward:
                return f"{step} runs in the backward, and what it makes is marked to be saved"
    return ""


def _named(snapshot: StepSnapshot, storage: int) -> str:
    described = snapshot.storages[storage]
    sources = ", ".join(map(repr, described.mark_sources))
    return f"{described.name} ({sources})" if sources else described.name


def broken_move(snapshot: StepSnapshot, schedule: Schedule) -> str:
    """The first fault of a schedule's moves and fetches, in words; empty if there is none."""
    for move in schedule.moves:
        if move.storage >= len(snapshot.storages):
            return f"storage {move.storage} moves, and the last is {len(snapshot.storages) - 1}"
        storage = snapshot.storages[move.storage]
        is_held = not storage.kind.is_movable or move.storage in snapshot.updates
        if is_held or storage.mark or not storage.num_bytes:
            return f"{storage.name} moves, which has to stay: {storage.kind.value}"
    try:
        walk = MoveWalk(schedule.moves, len(schedule.forward))
        for position, index in enumerate(schedule.steps):
            walk.pass_gap(position)
            walk.run(snapshot.ops[index].reads, snapshot.ops[index].writes)
        walk.end()
    except MoveError as error:
        return str(error)
    for fetch in schedule.fetches:
        if fetch.storage >= len(snapshot.storages):
            return f"storage {fetch.storage} is fetched, and there are {len(snapshot.storages)}"
        kind = snapshot.storages[fetch.storage].kind
        if kind is not StorageKind.PARAMETER:
            return f"{snapshot.storages[fetch.storage].name} is fetched, which is no weight"
    reads = [snapshot.ops[index].reads for index in schedule.steps]
    return broken_fetch(schedule.fetches, reads, len(schedule.forward))
