"""The tree of a plan's blocks as text: a row for each part, pass-through values below."""

from __future__ import annotations

from collections.abc import Iterator

from rockmate.budget import size_text
from rockmate.plan.block_table import bytes_of, heads, row_of, row_text
from rockmate.plan.block_tree import BlockNode, PassThrough
from rockmate.plan.record import PlanRecord

# Number of pass-through values that are named, largest first.
_NUM_NAMED_VALUES = 12


def tree_text(plan: PlanRecord) -> str:
    """The text of `Plan.tree`."""
    whole = plan.block_tree
    parts = [(whole.name, whole), *_labelled_parts(whole)]
    width = max(len(label) for label, _ in parts)
    lines = [f"{'':<{width}} {'blocks':>9} {'forward ops':>11} {heads(plan)}"]
    for label, part in parts:
        row = row_of(plan, part.name, part.ops)
        numbers = str(part.first_block)
        if part.first_block != part.last_block:
            numbers = f"{part.first_block} to {part.last_block}"
        lines.append(f"{label:<{width}} {numbers:>9} {len(part.forward):>11} {row_text(plan, row)}")
    return "\n".join([*lines, *_pass_through_lines(plan)])


def _labelled_parts(node: BlockNode, prefix: str = "") -> Iterator[tuple[str, BlockNode]]:
    """The parts below a node, each with its name behind the lines of the tree."""
    for part in node.parts:
        is_last = part is node.parts[-1]
        yield f"{prefix}{'└─ ' if is_last else '├─ '}{part.name}", part
        yield from _labelled_parts(part, prefix + ("   " if is_last else "│  "))


def _pass_through_lines(plan: PlanRecord) -> list[str]:
    values = plan.pass_through_values
    if not values:
        return ["no values cross blocks unused"]
    all_bytes = bytes_of(plan, [value.storage for value in values])
    lines = [f"{len(values)} values cross blocks unused, {size_text(all_bytes)}:"]
    lines += [_pass_through_line(plan, value) for value in values[:_NUM_NAMED_VALUES]]
    rest = [value.storage for value in values[_NUM_NAMED_VALUES:]]
    if rest:
        saved = [storage for storage in rest if plan.residency.is_saved(storage)]
        lines.append(
            f"  {len(rest)} more, {size_text(bytes_of(plan, rest))}, of which "
            f"{size_text(bytes_of(plan, saved))} is saved"
        )
    return lines


def _pass_through_line(plan: PlanRecord, value: PassThrough) -> str:
    storage, whole = plan.snapshot.storages[value.storage], plan.block_tree
    fate = "not saved"
    if any(move.storage == value.storage for move in plan.schedule.moves):
        fate = "moved away and back"
    elif plan.residency.is_saved(value.storage):
        fate = "saved for the backward"
    elif plan.is_recomputed(value.storage):
        fate = "recomputed in the backward"
    return (
        f"  {storage.name}, {size_text(storage.num_bytes)}: "
        f"block {value.made_in} ({whole.block(value.made_in).name}) to "
        f"block {value.read_in} ({whole.block(value.read_in).name}), {fate}"
    )
