"""What a plan does, in words: with one value, block by block, and at its peak.

Every statement is read off the schedule (`residency`), so it holds for whatever solver made it. The dataclasses are for programs, their
`str` for people.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rockmate.budget import size_text
from rockmate.errors import UnknownNameError
from rockmate.graph.snapshot import SnapshotBlock, SnapshotStorage, StorageKind
from rockmate.plan.block_tree import BlockNode
from rockmate.plan.record import PlanRecord
from rockmate.plan.residency import LiveInterval, LiveItem

_CLOSE = 0.5  # likeness from which a name is suggested
_NUM_SUGGESTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageExplanation:
    """What a plan does with one storage.

    Attributes:
        name: of the node that makes it.
        aliases: of nodes that view it, and of the parameter, buffer or input that it is.
        kind: what it is to the step.
        num_bytes: its size.
        made_by: the call that makes it, empty for what is given.
        module: path of the submodule that makes it, empty if unknown.
        source: the user's line that makes it, empty if unknown.
        is_kept: whether it is in memory from the forward into the backward.
        num_recomputations: how often its op runs again.
        recompute_ms: time of all those runs.
        rule: why it is kept or recomputed, or neither.
        option: of the block that makes it in the forward: what the plan keeps of that block.
        backward_readers: names of the ops that read it in the backward, in running order.
        residency: when it is in memory, a line for each time, with what releases it.
    """

    name: str
    aliases: tuple[str, ...]
    kind: StorageKind
    num_bytes: int
    made_by: str
    module: str
    source: str
    is_kept: bool
    num_recomputations: int
    recompute_ms: float
    rule: str
    option: str
    backward_readers: tuple[str, ...]
    residency: tuple[str, ...]

    @property
    def fate(self) -> str:
        """Kept, recomputed, both, or neither."""
        recompute = (
            f"recomputed {_times(self.num_recomputations)}, {self.recompute_ms:.3f} ms in all"
        )
        if self.kind.is_static:
            return "static: there before the step and after it, not counted"
        if self.is_kept:
            return "kept from the forward to the backward" + (
                f", and {recompute}" if self.num_recomputations else ""
            )
        return (
            f"not kept, {recompute}" if self.num_recomputations else "neither kept nor recomputed"
        )

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.kind.value}, {size_text(self.num_bytes)} ({self.num_bytes:,} bytes)"
        ]
        rows = [
            ("also called", ", ".join(self.aliases)),
            ("made by", self.made_by),
            ("in module", self.module),
            ("at line", self.source),
        ]
        rows += [("fate", self.fate), ("because", self.rule), ("option", self.option)]
        rows.append(
            (
                "read in backward by",
                ", ".join(self.backward_readers) or ("" if self.kind.is_static else "nobody"),
            )
        )
        rows += [("in memory", stay) for stay in self.residency]
        return "\n".join([*lines, *(f"  {title:<20} {text}" for title, text in rows if text)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a plan does with the storages that a name stands for.

    Attributes:
        name: as it was asked for: a node, a parameter, buffer or input, or the path of a submodule.
        storages: one for a value; for a submodule, each one that its forward makes.
        loss_block: where the name belongs to the submodule of the loss block, whether that runs in chunks, and why.
        feed_forward: the same of each large block that begins with a matrix product which widens its operand.
    """

    name: str
    storages: tuple[StorageExplanation, ...]
    loss_block: str = ""
    feed_forward: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = sum(storage.num_bytes for storage in self.storages if storage.is_kept)
        lines = [str(storage) for storage in self.storages]
        if len(self.storages) > 1:
            made = sum(storage.num_bytes for storage in self.storages)
            recompute = sum(storage.num_recomputations > 0 for storage in self.storages)
            lines.insert(
                0,
                f"{self.name}: makes {len(self.storages)} storages of {size_text(made)} in the forward; {size_text(kept)} is kept for the "
                f"backward, {recompute} storages are recomputed",
            )
        lines += [f"loss block: {self.loss_block}"] if self.loss_block else []
        return "\n".join([*lines, *(f"block that widens {text}" for text in self.feed_forward)])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One block of the chain under a plan.

    Attributes:
        name: the submodules that its ops come from.
        num_ops: forward and backward ops.
        made_bytes: of all storages that its forward makes.
        kept_bytes: of those, in memory from the forward into the backward.
        num_recomputed: runs that repeat one of its ops.
        recompute_ms: their time.
        peak_bytes: most bytes in use, of the whole step, while one of its ops runs.
        is_peak: whether the step's peak is there.
    """

    name: str
    num_ops: int
    made_bytes: int
    kept_bytes: int
    num_recomputed: int
    recompute_ms: float
    peak_bytes: int
    is_peak: bool


class LiveBytes(NamedTuple):
    """A description of something that takes memory, and how much."""

    description: str
    num_bytes: int


# --- one value -----------------------------------------------------------------------------------------


def explain(plan: PlanRecord, name: str) -> Explanation:
    """What the plan does with a value or a submodule; see `Plan.explain`."""
    found = _explained(plan, name)
    modules = {name, *(storage.module for storage in found)} - {""}
    return Explanation(
        name=name,
        storages=found,
        loss_block=plan.loss_block.text if plan.loss_block.module in modules else "",
        feed_forward=tuple(
            f"{note.module}: {note.text}" for note in plan.feed_forward if note.module in modules
        ),
    )


def _explained(plan: PlanRecord, name: str) -> tuple[StorageExplanation, ...]:
    if not isinstance(name, str) or not name.strip():
        msg = (
            f"{name!r} is no name. Give that of a value, parameter, buffer or input, or the path of a submodule, as text; of the whole "
            "model plan.tree() and plan.block_table() tell."
        )
        raise UnknownNameError(msg)
    for index, storage in enumerate(plan.snapshot.storages):
        if name == storage.name or name in storage.aliases:
            return (_explain_storage(plan, index),)
    within = f"{name}."
    made = [
        storage
        for op in plan.snapshot.ops
        if op.name == name or (op.phase != "backward" and f"{op.module}.".startswith(within))
        for storage in op.writes
    ]
    if not made:
        parts = [part for _, part in plan.block_tree.walk() if part.name == name]
        made = [
            storage
            for part in parts
            for op in part.forward
            for storage in plan.snapshot.ops[op].writes
        ]
    if not made:
        raise UnknownNameError(_unknown(plan, name))
    return tuple(_explain_storage(plan, index) for index in made)


def _unknown(plan: PlanRecord, name: str) -> str:
    known = {path for op in plan.snapshot.ops if op.module for path in _prefixes(op.module)}
    known.update(op.name for op in plan.snapshot.ops)
    known.update(
        known_name
        for storage in plan.snapshot.storages
        for known_name in (storage.name, *storage.aliases)
    )
    spelled: dict[
        str, list[str]
    ] = {}  # names by their lower case: who mistypes a name may mistake its case, too
    for known_name in sorted(known):
        spelled.setdefault(known_name.lower(), []).append(known_name)
    sought = name.lower()
    close = difflib.get_close_matches(sought, spelled, n=_NUM_SUGGESTED, cutoff=_CLOSE)
    ending = [lower for lower in spelled if lower.endswith(f".{sought}")][:_NUM_SUGGESTED]
    suggested = [
        known_name for lower in dict.fromkeys([*ending, *close]) for known_name in spelled[lower]
    ]
    hint = (
        f"Close to it are {', '.join(suggested)}."
        if suggested
        else "The names are in plan.to_text()."
    )
    return f"{name!r} is neither a value of the captured graph, nor a parameter, buffer or input, nor a submodule that makes one. {hint}"


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _explain_storage(plan: PlanRecord, index: int) -> StorageExplanation:
    storage = plan.snapshot.storages[index]
    producer = next((i for i, op in enumerate(plan.snapshot.ops) if index in op.writes), None)
    op = plan.snapshot.ops[producer] if producer is not None else None
    recompute_counts = (
        max(0, plan.schedule.steps.count(producer) - 1) if producer is not None else 0
    )
    num_forward = len(plan.schedule.forward)
    readers = [
        plan.snapshot.ops[run].name
        for run in plan.schedule.backward
        if index in plan.snapshot.ops[run].reads
    ]
    return StorageExplanation(
        name=storage.name,
        aliases=storage.aliases,
        kind=storage.kind,
        num_bytes=storage.num_bytes,
        made_by=op.call if op else "",
        module=op.module if op else "",
        source=op.source if op else "",
        is_kept=plan.residency.is_saved(index),
        num_recomputations=recompute_counts,
        recompute_ms=recompute_counts * plan.costs.recompute[producer].time_ms
        if producer is not None
        else 0.0,
        rule=_rule(plan, index, producer, recompute_counts),
        option=_option(plan, producer)
        if producer is not None and op and op.phase == "forward"
        else "",
        backward_readers=tuple(dict.fromkeys(readers)),
        residency=tuple(
            _stay_text(plan, stay, num_forward) for stay in plan.residency.intervals.get(index, ())
        ),
    )


def _rule(plan: PlanRecord, index: int, producer: int | None, recompute_counts: int) -> str:
    kind = plan.snapshot.storages[index].kind
    if producer is None:
        return (
            "autograd makes it and holds it until the backward has ended"
            if kind is StorageKind.TANGENT
            else ""
        )
    if kind is StorageKind.OUTPUT:
        return "the model returns it, so it counts until the backward has ended"
    if kind is StorageKind.RETURNED_GRADIENT:
        return "the backward returns it when it ends"
    if kind is StorageKind.GRADIENT:
        return "the backward makes it and uses it up"
    op = plan.snapshot.ops[producer]
    if op.phase == "late":
        return "only the backward needs it, so it is made there"
    if plan.residency.is_saved(index):
        if not op.is_recomputable:
            return "its op must not run twice (it depends on what the forward overwrites)"
        passage = _passage(plan, index)
        if passage:
            return f"{passage}, and stays until the backward has read it"
        if index in plan.chain.carried:
            return "it serves many blocks, and stays from its making to its last read"
        boundary = next(
            (i for i, block in enumerate(plan.chain.blocks) if block.output == index), None
        )
        edge = (
            f"it is the boundary from block {boundary} to block {boundary + 1}; "
            if boundary is not None
            else ""
        )
        return f"{edge}this plan keeps it"
    if recompute_counts:
        passage = _passage(plan, index)
        if passage:
            return f"{passage}, and is made again for the backward: at this budget that costs less than its room"
        return "this plan does not keep it, and the backward needs it or what is made of it"
    return "the backward does not need it"


def _passage(plan: PlanRecord, index: int) -> str:
    """From where to where a storage passes blocks by; empty if it does not."""
    found = next(
        (passage for passage in plan.pass_through_values if passage.storage == index), None
    )
    if found is None:
        return ""
    ends = [
        f"block {number} ({plan.block_tree.block(number).name})"
        for number in (found.made_in, found.read_in)
    ]
    return f"it is carried from {ends[0]} to {ends[1]}"


def _option(plan: PlanRecord, producer: int) -> str:
    number, block = next(
        (i, block) for i, block in enumerate(plan.chain.blocks) if producer in block.ops
    )
    path = plan.block_tree.path_to(producer)[1:]
    own = plan.block_tree.block(number).name
    around = [part.name for part in reversed(path) if part.first_block != part.last_block]
    inside = [
        part.name for part in path if part.first_block == part.last_block and part.name != own
    ]
    made = _made_by_forward(plan, block)
    kept = [storage for storage in made if plan.residency.is_saved(storage)]
    return (
        f"strategy {plan.strategy!r}, block {number} ({own}){''.join(f' in {name}' for name in around)}: keeps {len(kept)} of {len(made)} "
        f"storages, {size_text(_bytes(plan, kept))} of {size_text(_bytes(plan, made))}"
        + (f"; made in its part {inside[-1]}" if inside else "")
    )


def _stay_text(plan: PlanRecord, stay: LiveInterval, num_forward: int) -> str:
    snapshot, steps = plan.snapshot, plan.schedule.steps
    storage = snapshot.storages[stay.storage]
    begin = (
        "given"
        if storage.kind is StorageKind.TANGENT
        else "made again"
        if stay.is_repeated
        else "made"
    )
    text = f"{begin} at {_place(stay.first, num_forward)}"
    if storage.kind.is_result or storage.kind is StorageKind.TANGENT:
        return f"{text}, held by others until the step ends"
    last = snapshot.ops[steps[stay.last]].name
    if stay.last == stay.first:
        return f"{text}, released there"
    if stay.last not in stay.reads:
        return f"{text}, released when the forward has ended and it is copied to its buffer"
    return f"{text}, released after {last} at {_place(stay.last, num_forward)}"


def _place(position: int, num_forward: int) -> str:
    return f"step {position} ({'forward' if position < num_forward else 'backward'})"


def _times(number: int) -> str:
    return "once" if number == 1 else "twice" if number == 2 else f"{number} times"


# --- blocks --------------------------------------------------------------------------------------------


def block_rows(plan: PlanRecord) -> tuple[BlockRow, ...]:
    """A row a block, in forward order."""
    return tuple(row_of(plan, block.name, block.ops) for block in plan.chain.blocks)


def row_of(plan: PlanRecord, name: str, ops: Sequence[int]) -> BlockRow:
    """What some ops of the step make, keep and recompute."""
    made = [
        storage
        for index in ops
        if plan.snapshot.ops[index].phase == "forward"
        for storage in plan.snapshot.ops[index].writes
    ]
    recompute, highest = plan.recompute_counts, plan.highest_bytes
    return BlockRow(
        name=name,
        num_ops=len(ops),
        made_bytes=_bytes(plan, made),
        kept_bytes=_bytes(plan, [storage for storage in made if plan.residency.is_saved(storage)]),
        num_recomputed=sum(recompute[index] for index in ops),
        recompute_ms=sum(recompute[index] * plan.costs.recompute[index].time_ms for index in ops),
        peak_bytes=max((highest.get(index, 0) for index in ops), default=0),
        is_peak=plan.schedule.steps[plan.simulation.peak_position] in ops,
    )


def block_table(plan: PlanRecord) -> str:
    """The rows as text; see `Plan.block_table`."""
    rows = block_rows(plan)
    width = max(len("block"), *(len(row.name) for row in rows))
    lines = [
        f"{'':>4} {'block':<{width}} {'ops':>5} {'made':>10} {'kept':>10} {'recompute':>6} {'ms recompute':>9} {'peak':>10}"
    ]
    for number, row in enumerate(rows):
        lines.append(
            f"{number:>4} {row.name:<{width}} {row.num_ops:>5} {size_text(row.made_bytes):>10} {size_text(row.kept_bytes):>10} "
            f"{row.num_recomputed:>6} {row.recompute_ms:>9.3f} {size_text(row.peak_bytes):>10}"
            + (" <- peak" if row.is_peak else "")
        )
    made, kept = sum(row.made_bytes for row in rows), sum(row.kept_bytes for row in rows)
    lines.append(
        f"{'':>4} {'all':<{width}} {sum(row.num_ops for row in rows):>5} {size_text(made):>10} {size_text(kept):>10} "
        f"{sum(row.num_recomputed for row in rows):>6} {sum(row.recompute_ms for row in rows):>9.3f} "
        f"{size_text(plan.simulation.peak_bytes):>10}"
    )
    return "\n".join(lines)


def _made_by_forward(plan: PlanRecord, block: SnapshotBlock) -> list[int]:
    ops = (plan.snapshot.ops[index] for index in block.ops)
    return [storage for op in ops if op.phase == "forward" for storage in op.writes]


def _bytes(plan: PlanRecord, storages: Sequence[int]) -> int:
    return sum(plan.snapshot.storages[storage].num_bytes for storage in storages)


# --- memory over time ----------------------------------------------------------------------------------


def live_at(plan: PlanRecord, position: int) -> list[LiveBytes]:
    """What takes memory while the run at `position` goes on, largest first; the sum is `live_bytes[position]`."""
    found = [
        LiveBytes(_occupant_text(plan, occupant), occupant.num_bytes)
        for occupant in plan.residency.live_items_at(position, plan.costs)
    ]
    return sorted(found, key=lambda live: -live.num_bytes)


def _occupant_text(plan: PlanRecord, occupant: LiveItem) -> str:
    if occupant.storage is None:
        assert occupant.op is not None
        if occupant.num_bytes < 0:
            return f"released on its way by {plan.snapshot.ops[occupant.op].name}"
        return f"{occupant.what} of {plan.snapshot.ops[occupant.op].name}"
    storage = plan.snapshot.storages[occupant.storage]
    return f"{storage.name} ({_origin(plan, occupant.storage, storage)})"


def _origin(plan: PlanRecord, index: int, storage: SnapshotStorage) -> str:
    module = next((op.module for op in plan.snapshot.ops if index in op.writes), "")
    return f"{storage.kind.value} of {module}" if module else storage.kind.value


_NUM_PASSING = 12  # storages that are named


# --- as text -------------------------------------------------------------------------------------------


def tree_text(plan: PlanRecord) -> str:
    """The tree with what each part makes, keeps and recomputes, and what passes blocks by; see `Plan.tree`."""
    pass

    whole = plan.block_tree
    rows = [
        (label, part, row_of(plan, part.name, part.ops))
        for label, part in [(whole.name, whole), *_labelled(whole)]
    ]
    width = max(len(label) for label, _, _ in rows)
    heads = f"{'blocks':>9} {'forward ops':>11} {'made':>10} {'kept':>10} {'recompute':>6} {'ms recompute':>9} {'peak':>10}"
    lines = [
        f"{'':<{width}} {heads}",
        *(_line(label, part, row, width) for label, part, row in rows),
    ]
    return "\n".join([*lines, *_passing_lines(plan)])


def _labelled(part: BlockNode, prefix: str = "") -> Iterator[tuple[str, BlockNode]]:
    """What is below a part, each with the lines of the tree in front of its name."""
    for inner in part.parts:
        is_last = inner is part.parts[-1]
        yield f"{prefix}{'└─ ' if is_last else '├─ '}{inner.name}", inner
        yield from _labelled(inner, prefix + ("   " if is_last else "│  "))


def _line(label: str, part: BlockNode, row: BlockRow, width: int) -> str:
    numbers = (
        str(part.first_block)
        if part.first_block == part.last_block
        else f"{part.first_block} to {part.last_block}"
    )
    return (
        f"{label:<{width}} {numbers:>9} {len(part.forward):>11} {size_text(row.made_bytes):>10} {size_text(row.kept_bytes):>10} "
        f"{row.num_recomputed:>6} {row.recompute_ms:>9.3f} {size_text(row.peak_bytes):>10}"
        + (" <- peak" if row.is_peak else "")
    )


def _passing_lines(plan: PlanRecord) -> list[str]:
    found = plan.pass_through_values
    if not found:
        return ["nothing passes a block by"]
    storages, whole = plan.snapshot.storages, plan.block_tree
    lines = [
        f"{len(found)} storages pass blocks by, {size_text(sum(storages[p.storage].num_bytes for p in found))}:"
    ]
    for passage in found[:_NUM_PASSING]:
        storage, is_kept = storages[passage.storage], plan.residency.is_saved(passage.storage)
        fate = (
            "kept for the backward"
            if is_kept
            else "made again in the backward"
            if plan.is_recomputed(passage.storage)
            else "not kept"
        )
        lines.append(
            f"  {storage.name}, {size_text(storage.num_bytes)}: block {passage.made_in} ({whole.block(passage.made_in).name}) to block "
            f"{passage.read_in} ({whole.block(passage.read_in).name}), {fate}"
        )
    rest = found[_NUM_PASSING:]
    if rest:
        all_bytes = sum(storages[p.storage].num_bytes for p in rest)
        kept_bytes = sum(
            storages[p.storage].num_bytes for p in rest if plan.residency.is_saved(p.storage)
        )
        lines.append(
            f"  {len(rest)} more, {size_text(all_bytes)}, of which {size_text(kept_bytes)} is kept"
        )
    return lines
