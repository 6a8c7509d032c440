"""What the blocks of a plan and their parts make, save and recompute: rows, and one table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rockmate.budget import size_text
from rockmate.plan.block_tree import BlockNode
from rockmate.plan.record import PlanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """A block of a plan, or another part of its tree.

    Attributes:
        name: the submodules that its ops come from.
        num_ops: number of forward and backward ops.
        made_bytes: bytes of all values that its forward makes.
        kept_bytes: bytes of those that are saved for the backward.
        moved_bytes: bytes of those that move to another memory tier and back.
        num_recomputed: number of recomputations of its ops.
        recompute_ms: time of these recomputations.
        peak_bytes: most bytes in memory, of the whole step, while one of its ops runs.
        is_peak: whether the step's peak is in it.
    """

    name: str
    num_ops: int
    made_bytes: int
    kept_bytes: int
    num_recomputed: int
    recompute_ms: float
    peak_bytes: int
    is_peak: bool
    moved_bytes: int = 0


def block_rows(plan: PlanRecord) -> tuple[BlockRow, ...]:
    """One row for each block, in forward order."""
    return tuple(_row_of(plan, part) for part in plan.block_tree.blocks())


def _row_of(plan: PlanRecord, part: BlockNode) -> BlockRow:
    made = plan.made_by(part.ops)
    saved = [storage for storage in made if plan.residency.is_saved(storage)]
    moved = {move.storage for move in plan.schedule.moves}
    recompute, highest = plan.recompute_counts, plan.highest_bytes
    return BlockRow(
        name=part.name,
        num_ops=len(part.ops),
        made_bytes=plan.bytes_of(made),
        kept_bytes=plan.bytes_of(saved),
        num_recomputed=sum(recompute[index] for index in part.ops),
        recompute_ms=sum(recompute[op] * plan.costs.recompute[op].time_ms for op in part.ops),
        peak_bytes=max((highest.get(index, 0) for index in part.ops), default=0),
        is_peak=plan.schedule.steps[plan.simulation.peak_position] in part.ops,
        moved_bytes=plan.bytes_of(storage for storage in made if storage in moved),
    )


def table_text(plan: PlanRecord, *, is_tree: bool) -> str:
    """The rows of the whole model and of its blocks, or of all parts of its tree.

    What moves has a column if anything does.
    """
    whole = plan.block_tree
    parts = [*whole.walk()][1:] if is_tree else [("", part) for part in whole.blocks()]
    heads = ("blocks", "ops", "forward", "made", "saved", "moved", "recomputed", "in ms", "peak")
    table: list[tuple[str, ...]] = [("", *heads, "")]
    for label, part in [("", whole), *parts]:
        row = _row_of(plan, part)
        numbers = f"{part.first_block} to {part.last_block}"
        cells = (
            f"{label}{part.name}",
            numbers if part.first_block != part.last_block else str(part.first_block),
            str(row.num_ops),
            str(len(part.forward)),
            *map(size_text, (row.made_bytes, row.kept_bytes, row.moved_bytes)),
            str(row.num_recomputed),
            f"{row.recompute_ms:.3f}",
            size_text(row.peak_bytes),
            "<- peak" if row.is_peak and len(table) > 1 else "",
        )
        table.append(cells)
    columns = [
        (max(map(len, cells)), cells)
        for cells in zip(*table, strict=True)
        if cells[0] != "moved" or plan.schedule.moves
    ]
    (width, names), *others = columns
    lines = [
        " ".join([name.ljust(width), *(cells[number].rjust(size) for size, cells in others)])
        for number, name in enumerate(names)
    ]
    return "\n".join(line.rstrip() for line in lines)


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
            state = "random state" if op.is_random else "saved state"
            yield LiveBytes(f"{state} of {op.name}", op.state_bytes)
    overhead_bytes = plan.schedule.run_costs(plan.costs)[position].overhead_bytes
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
