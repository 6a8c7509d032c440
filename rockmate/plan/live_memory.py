"""The memory in use at one run of a plan, item by item, in words."""

from __future__ import annotations

from typing import NamedTuple

from rockmate.plan.record import PlanRecord
from rockmate.plan.residency import LiveItem


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
    items = plan.residency.live_items_at(position, plan.costs)
    found = [LiveBytes(_item_text(plan, item), item.num_bytes) for item in items]
    return sorted(found, key=lambda live: -live.num_bytes)


def _item_text(plan: PlanRecord, item: LiveItem) -> str:
    if item.storage is not None:
        storage = plan.snapshot.storages[item.storage]
        return f"{storage.name} ({_origin_text(plan, item.storage)})"
    if item.op is None:
        return "saved values of the other forwards in flight"
    name = plan.snapshot.ops[item.op].name
    return f"released early by {name}" if item.num_bytes < 0 else f"{item.what} of {name}"


def _origin_text(plan: PlanRecord, storage: int) -> str:
    kind = plan.snapshot.storages[storage].kind.value
    module = next((op.module for op in plan.snapshot.ops if storage in op.writes), "")
    return f"{kind} of {module}" if module else kind
