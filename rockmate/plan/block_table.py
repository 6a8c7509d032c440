"""What each block of a plan makes, saves and recomputes, as rows and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rockmate.budget import size_text
from rockmate.plan.record import PlanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One block of a plan.

    Attributes:
        name: the submodules that its ops come from.
        num_ops: number of forward and backward ops.
        made_bytes: bytes of all values that its forward makes.
        kept_bytes: bytes of those that are saved for the backward.
        moved_bytes: bytes of those that move to another memory tier and back.
        num_recomputed: number of recomputations of its ops.
        recompute_ms: time of these recomputations.
        peak_bytes: most bytes in memory, of the whole step, while one of its ops runs.
        is_peak: whether the step's peak is in the block.
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
    return tuple(row_of(plan, block.name, block.ops) for block in plan.chain.blocks)


def row_of(plan: PlanRecord, name: str, ops: Sequence[int]) -> BlockRow:
    """The row of some ops of the step.

    Args:
        plan: the plan.
        name: the name in the row.
        ops: indices of the ops.
    """
    made = made_by_forward(plan, ops)
    saved = [storage for storage in made if plan.residency.is_saved(storage)]
    moved = {move.storage for move in plan.schedule.moves}
    recompute, highest = plan.recompute_counts, plan.highest_bytes
    return BlockRow(
        name=name,
        num_ops=len(ops),
        made_bytes=bytes_of(plan, made),
        kept_bytes=bytes_of(plan, saved),
        num_recomputed=sum(recompute[index] for index in ops),
        recompute_ms=sum(recompute[index] * plan.costs.recompute[index].time_ms for index in ops),
        peak_bytes=max((highest.get(index, 0) for index in ops), default=0),
        is_peak=plan.schedule.steps[plan.simulation.peak_position] in ops,
        moved_bytes=bytes_of(plan, [each for each in made if each in moved]),
    )


def block_table(plan: PlanRecord) -> str:
    """`block_rows` as text, with a row of sums below."""
    rows = block_rows(plan)
    width = max(len("block"), *(len(row.name) for row in rows))
    lines = [f"{'':>4} {'block':<{width}} {'ops':>5} {heads(plan)}"]
    for number, row in enumerate(rows):
        lines.append(f"{number:>4} {row.name:<{width}} {row.num_ops:>5} {row_text(plan, row)}")
    total = BlockRow(
        name="all",
        num_ops=sum(row.num_ops for row in rows),
        made_bytes=sum(row.made_bytes for row in rows),
        kept_bytes=sum(row.kept_bytes for row in rows),
        num_recomputed=sum(row.num_recomputed for row in rows),
        recompute_ms=sum(row.recompute_ms for row in rows),
        peak_bytes=plan.simulation.peak_bytes,
        is_peak=False,
        moved_bytes=sum(row.moved_bytes for row in rows),
    )
    lines.append(f"{'':>4} {total.name:<{width}} {total.num_ops:>5} {row_text(plan, total)}")
    return "\n".join(lines)


def heads(plan: PlanRecord) -> str:
    """Titles of the columns that `row_text` writes; what moves has one if anything does."""
    moved = f" {'moved':>10}" if plan.schedule.moves else ""
    return f"{'made':>10} {'saved':>10}{moved} {'recomputed':>10} {'in ms':>9} {'peak':>10}"


def row_text(plan: PlanRecord, row: BlockRow) -> str:
    """The figures of a row in columns."""
    moved = f" {size_text(row.moved_bytes):>10}" if plan.schedule.moves else ""
    return (
        f"{size_text(row.made_bytes):>10} {size_text(row.kept_bytes):>10}{moved} "
        f"{row.num_recomputed:>10} {row.recompute_ms:>9.3f} {size_text(row.peak_bytes):>10}"
        + (" <- peak" if row.is_peak else "")
    )


def made_by_forward(plan: PlanRecord, ops: Sequence[int]) -> list[int]:
    """Indices of the storages that the forward ops among `ops` make."""
    described = (plan.snapshot.ops[index] for index in ops)
    return [storage for op in described if op.phase == "forward" for storage in op.writes]


def bytes_of(plan: PlanRecord, storages: Sequence[int]) -> int:
    """Bytes of some storages."""
    return sum(plan.snapshot.storages[storage].num_bytes for storage in storages)
