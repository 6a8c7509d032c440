"""The moves of a plan in words, and whether a schedule's moves are valid."""

from __future__ import annotations

from rockmate.budget import size_text
from rockmate.graph.snapshot import StepSnapshot, StorageKind
from rockmate.plan.record import PlanRecord
from rockmate.schedule.fetch import broken_fetch
from rockmate.schedule.move import MoveError, MoveWalk
from rockmate.schedule.schedule import Schedule

_TIERS = {"host": "host memory", "disk": "the disk"}


def tier_name(plan: PlanRecord) -> str:
    """The tier that values move to, in words."""
    return _TIERS[plan.offload.kind] if plan.offload else "another memory tier"


def moved_text(plan: PlanRecord) -> str:
    """How many values move, of how many bytes, and for how long the step waits for them."""
    moves, lanes = plan.schedule.moves, plan.simulation.lanes
    assert lanes is not None
    moved_bytes = sum(plan.snapshot.storages[move.storage].num_bytes for move in moves)
    number = len(moves)
    waited_ms = sum(lanes.sent_waits_ms[:number]) + sum(lanes.fetched_waits_ms[:number])
    values = f"{len(moves)} value{'s' if len(moves) > 1 else ''}"
    return (
        f"{values} to {tier_name(plan)} and back, {size_text(moved_bytes)}, which take "
        f"{size_text(plan.simulation.host_bytes)} there; the step waits {waited_ms:.1f} ms "
        "for them"
    )


def fetched_text(plan: PlanRecord) -> str:
    """How many frozen weights are at home, of how many bytes, and how long the step waits."""
    fetches, lanes = plan.schedule.fetches, plan.simulation.lanes
    assert lanes is not None
    sizes = {each.storage: plan.snapshot.storages[each.storage].num_bytes for each in fetches}
    copied_bytes = sum(sizes[each.storage] for each in fetches)
    waited_ms = sum(lanes.fetched_waits_ms[len(plan.schedule.moves) :])
    return (
        f"{len(sizes)} frozen ones of {size_text(sum(sizes.values()))} at home in "
        f"{tier_name(plan)}; {len(fetches)} copies of {size_text(copied_bytes)} a step, for which "
        f"it waits {waited_ms:.1f} ms"
    )


def move_texts(plan: PlanRecord, storage: int) -> tuple[str, ...]:
    """When a storage's copies begin and have to have ended, and what is waited for."""
    lanes = plan.simulation.lanes
    texts = []
    for index, move in enumerate(plan.schedule.moves):
        if move.storage == storage and lanes is not None:
            sent_ms, fetched_ms = lanes.sent_waits_ms[index], lanes.fetched_waits_ms[index]
            texts.append(
                f"to {tier_name(plan)}: copied out from step {move.send} on, gone before step "
                f"{move.sent} (the step waits {sent_ms:.3f} ms); copied back from step "
                f"{move.fetch} on, there before step {move.fetched} ({fetched_ms:.3f} ms)"
            )
    return tuple(texts)


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
