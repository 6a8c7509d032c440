"""The memory in use at one run of a plan, item by item, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rockmate.plan.record import PlanRecord


class LiveBytes(NamedTuple):
    """One item that takes memory.

    Attributes:
        description: the value, state or workspace, in words.
        num_bytes: its size.
    """

    description: str
    num_bytes: int


def live_at(plan: PlanRecord, position: int) -> list[LiveBytes]:
    """Everything in memory during the run at `position`, largest first.

    The bytes add up to `plan.simulation.live_bytes[position]`.
    """
    return sorted(_items_at(plan, position), key=lambda live: -live.num_bytes)


def _items_at(plan: PlanRecord, position: int) -> Iterator[LiveBytes]:
    ops, storages, residency = plan.snapshot.ops, plan.snapshot.storages, plan.residency
    index = plan.schedule.steps[position]
    # The result of a run in place is left out: the operand stands for both.
    taken = ops[index].writes[0] if position in plan.schedule.in_place else None
    for interval in residency.all():
        is_taken = interval.storage == taken and interval.first == position
        if interval.first <= position <= interval.last and not is_taken:
            text = _value_text(plan, interval.storage)
            yield LiveBytes(text, storages[interval.storage].num_bytes)
    for other, first in residency.first_run.items():
        op = ops[other]
        if op.state_bytes and first <= position <= residency.last_run[other] != first:
            yield LiveBytes(f"{op.state_name} of {op.name}", op.state_bytes)
    is_first = residency.first_run[index] == position
    table = plan.costs.first if is_first else plan.costs.recompute
    overhead_bytes = table[index].overhead_bytes
    if overhead_bytes:
        what = "released early by" if overhead_bytes < 0 else "workspace of"
        yield LiveBytes(f"{what} {ops[index].name}", overhead_bytes)
    num_others = plan.snapshot.num_in_flight - 1
    if num_others:
        text = "saved values of the other forwards in flight"
        yield LiveBytes(text, num_others * plan.simulation.saved_bytes)


def _value_text(plan: PlanRecord, index: int) -> str:
    storage = plan.snapshot.storages[index]
    module = next((op.module for op in plan.snapshot.ops if index in op.writes), "")
    return f"{storage.name} ({storage.kind.value}{f' of {module}' if module else ''})"
