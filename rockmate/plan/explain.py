"""What a plan does with one value, or with the values of a submodule, in words.

Every statement is derived from the schedule's live intervals, so it holds whichever solver made the
plan. The dataclasses are for programs, their `str` for people.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import accumulate

from rockmate.budget import size_text
from rockmate.errors import UnknownNameError
from rockmate.graph.snapshot import SnapshotOp, StorageKind
from rockmate.plan.record import PlanRecord
from rockmate.plan.residency import LiveInterval

# Similarity, as of `difflib`, from which a name is suggested for an unknown one.
_SUGGESTION_CUTOFF = 0.5
# Number of similar names that are suggested.
_NUM_SUGGESTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageExplanation:
    """What a plan does with one storage.

    Attributes:
        name: name of the node that makes it.
        aliases: nodes that view it, and the parameter, buffer or input that it is.
        kind: what it is to the step.
        num_bytes: its size.
        made_by: the call that makes it, empty for parameters, buffers and inputs.
        module: path of the submodule that makes it, empty if unknown.
        source: the user's line that makes it, empty if unknown.
        is_kept: whether it is saved, that is live from the forward into the backward.
        num_recomputations: number of recomputations of its op.
        recompute_ms: time of all these recomputations.
        rule: why it is saved or recomputed, or neither.
        mark: the user's mark and what asked for it; empty without one.
        option: what the plan saves of the block that makes it; empty outside the forward.
        backward_readers: names of the ops that read it in the backward, in running order.
        residency: its live intervals in words, each with what releases it.
        moves: its ways to another memory tier and back, in words.
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
    mark: str
    option: str
    backward_readers: tuple[str, ...]
    residency: tuple[str, ...]
    moves: tuple[str, ...] = ()

    @property
    def fate(self) -> str:
        """Whether it is saved, moved, recomputed, several of these, or none."""
        if self.kind.is_static:
            return "static: there before the step and after it, not counted"
        number = self.num_recomputations
        times = {1: "once", 2: "twice"}.get(number, f"{number} times")
        recomputed = f"recomputed {times}, {self.recompute_ms:.3f} ms in all"
        if self.is_kept:
            fate = "saved from the forward to the backward"
        elif self.moves:
            fate = "moved away and brought back"
        else:
            return f"not saved, {recomputed if self.num_recomputations else 'not recomputed'}"
        return f"{fate}, and {recomputed}" if self.num_recomputations else fate

    def __str__(self) -> str:
        """A row for each attribute that says something."""
        size = f"{size_text(self.num_bytes)} ({self.num_bytes:,} bytes)"
        no_readers = "" if self.kind.is_static else "no op"
        rows = [
            ("also called", ", ".join(self.aliases)),
            ("made by", self.made_by),
            ("in module", self.module),
            ("at line", self.source),
            ("fate", self.fate),
            ("because", self.rule),
            ("mark", self.mark),
            ("option", self.option),
            ("read in backward by", ", ".join(self.backward_readers) or no_readers),
            *(("in memory", interval) for interval in self.residency),
            *(("moved", text) for text in self.moves),
        ]
        lines = [f"  {title:<20} {text}" for title, text in rows if text]
        return "\n".join([f"{self.name}: {self.kind.value}, {size}", *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a plan does with the storages that a name stands for.

    Attributes:
        name: the name that was asked for: a node, a parameter, buffer or input, or the path of a
            submodule.
        storages: the value's storage; for a submodule each storage that its forward makes.
        loss_block: for the submodule of the loss block, whether that runs in chunks, and why.
        feed_forward: the same for each large block of that submodule that begins with a matrix
            product which widens its operand.
    """

    name: str
    storages: tuple[StorageExplanation, ...]
    loss_block: str = ""
    feed_forward: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The explanations of all storages, with a summary on top if there are several."""
        lines = [str(storage) for storage in self.storages]
        if len(self.storages) > 1:
            lines.insert(0, self._summary())
        lines += [f"loss block: {self.loss_block}"] if self.loss_block else []
        lines += [f"block that widens {text}" for text in self.feed_forward]
        return "\n".join(lines)

    def _summary(self) -> str:
        made_bytes = sum(storage.num_bytes for storage in self.storages)
        saved_bytes = sum(storage.num_bytes for storage in self.storages if storage.is_kept)
        num_recomputed = sum(storage.num_recomputations > 0 for storage in self.storages)
        return (
            f"{self.name}: makes {len(self.storages)} storages of {size_text(made_bytes)} in the "
            f"forward; {size_text(saved_bytes)} is saved for the backward, "
            f"{num_recomputed} storages are recomputed"
        )


def explain(plan: PlanRecord, name: str) -> Explanation:
    """What the plan does with a value or a submodule; see `Plan.explain`."""
    storages = tuple(explain_storage(plan, index) for index in _storages_of(plan, name))
    modules = {name, *(storage.module for storage in storages)} - {""}
    return Explanation(
        name=name,
        storages=storages,
        loss_block=""
        if modules.isdisjoint(plan.loss_block.module.split(", "))
        else plan.loss_block.text,
        feed_forward=tuple(
            f"{note.module}: {note.text}" for note in plan.feed_forward if note.module in modules
        ),
    )


# --- names ------------------------------------------------------------------------------------


def _storages_of(plan: PlanRecord, name: str) -> list[int]:
    if not isinstance(name, str) or not name.strip():
        raise UnknownNameError(
            f"{name!r} is no name. Give that of a value, parameter, buffer or input, or the path "
            "of a submodule, as text. plan.tree() and plan.block_table() show the whole model."
        )
    for index, storage in enumerate(plan.snapshot.storages):
        if name == storage.name or name in storage.aliases:
            return [index]
    ops = plan.snapshot.ops
    within = f"{name}."
    made = [
        storage
        for op in ops
        if op.name == name or (op.phase != "backward" and f"{op.module}.".startswith(within))
        for storage in op.writes
    ]
    if not made:
        parts = [part for _, part in plan.block_tree.walk() if part.name == name]
        made = [storage for part in parts for op in part.forward for storage in ops[op].writes]
    if not made:
        raise UnknownNameError(_unknown_name_text(plan, name))
    return made


def _unknown_name_text(plan: PlanRecord, name: str) -> str:
    known = {op.name for op in plan.snapshot.ops}
    for module in {op.module for op in plan.snapshot.ops} - {""}:
        known.update(accumulate(module.split("."), "{}.{}".format))
    for storage in plan.snapshot.storages:
        known.update((storage.name, *storage.aliases))
    # By their lower case, because a mistyped name may have a mistyped case as well.
    spellings: dict[str, list[str]] = {}
    for each in sorted(known):
        spellings.setdefault(each.lower(), []).append(each)
    sought = name.lower()
    close = difflib.get_close_matches(
        sought, spellings, n=_NUM_SUGGESTED, cutoff=_SUGGESTION_CUTOFF
    )
    ending = [lower for lower in spellings if lower.endswith(f".{sought}")][:_NUM_SUGGESTED]
    suggested = [each for lower in dict.fromkeys([*ending, *close]) for each in spellings[lower]]
    hint = "The names are in plan.to_text()."
    if suggested:
        hint = f"Close to it are {', '.join(suggested)}."
    return (
        f"{name!r} is neither a value of the captured graph, nor a parameter, buffer or input, nor "
        f"a submodule that makes one. {hint}"
    )


# --- one storage ------------------------------------------------------------------------------


def explain_storage(plan: PlanRecord, index: int) -> StorageExplanation:
    """What the plan does with one storage."""
    storage, ops = plan.snapshot.storages[index], plan.snapshot.ops
    producer = next((number for number, op in enumerate(ops) if index in op.writes), None)
    op = None if producer is None else ops[producer]
    num_recomputations, recompute_ms, option = 0, 0.0, ""
    if producer is not None:
        num_recomputations = plan.recompute_counts[producer]
        recompute_ms = num_recomputations * plan.costs.recompute[producer].time_ms
        option = _option(plan, producer) if ops[producer].phase == "forward" else ""
    readers = [ops[run].name for run in plan.schedule.backward if index in ops[run].reads]
    intervals = plan.residency.intervals.get(index, ())
    return StorageExplanation(
        name=storage.name,
        aliases=storage.aliases,
        kind=storage.kind,
        num_bytes=storage.num_bytes,
        made_by=op.call if op else "",
        module=op.module if op else "",
        source=op.source if op else "",
        is_kept=plan.residency.is_saved(index),
        num_recomputations=num_recomputations,
        recompute_ms=recompute_ms,
        rule=_rule(plan, index, op, num_recomputations),
        mark=storage.mark and f"{storage.mark}, by {', '.join(map(repr, storage.mark_sources))}",
        option=option,
        backward_readers=tuple(dict.fromkeys(readers)),
        residency=tuple(_interval_text(plan, interval) for interval in intervals),
        moves=_move_texts(plan, index),
    )


def _rule(plan: PlanRecord, index: int, op: SnapshotOp | None, num_recomputations: int) -> str:
    """Why a storage is saved, recomputed, or neither; empty for static ones."""
    kind = plan.snapshot.storages[index].kind
    if op is None:
        is_tangent = kind is StorageKind.TANGENT
        return "autograd makes it and holds it until the backward has ended" if is_tangent else ""
    rule_of_kind = {
        StorageKind.OUTPUT: "the model returns it, so it counts until the backward has ended",
        StorageKind.RETURNED_GRADIENT: "the backward returns it when it ends",
        StorageKind.GRADIENT: "the backward makes it and uses it up",
    }
    if kind in rule_of_kind:
        return rule_of_kind[kind]
    if op.phase == "late":
        return "only the backward needs it, so it is made there"
    if any(move.storage == index for move in plan.schedule.moves):
        return "the backward needs it, and its copies take less time than its memory is worth"
    if plan.residency.is_saved(index):
        return _rule_of_saved(plan, index, op)
    if not num_recomputations:
        return "the backward does not need it"
    if plan.snapshot.storages[index].mark == "recompute":
        return "it is marked to be recomputed"
    return "this plan does not save it, and the backward needs it or a value made from it"


def _rule_of_saved(plan: PlanRecord, index: int, op: SnapshotOp) -> str:
    if plan.snapshot.storages[index].mark == "save":
        return "it is marked to be saved"
    if not op.is_recomputable:
        return "its op must not run twice (it depends on values that the forward overwrites)"
    if index in plan.chain.carried:
        return "many blocks read it, so it is live from its making to its last read"
    blocks = plan.chain.blocks
    boundary = next((number for number, block in enumerate(blocks) if block.output == index), None)
    if boundary is None:
        return "this plan saves it"
    return f"it is the boundary from block {boundary} to block {boundary + 1}; this plan saves it"


def _option(plan: PlanRecord, producer: int) -> str:
    """What the plan saves of the block of an op, and where in the tree that is."""
    _, *around, block = [part for _, part in plan.block_tree.walk() if producer in part.ops]
    made = plan.made_by(block.ops)
    saved = [storage for storage in made if plan.residency.is_saved(storage)]
    within = "".join(f" in {part.name}" for part in reversed(around))
    place = f"block {block.first_block} ({block.name}){within}"
    sizes = f"{size_text(plan.bytes_of(saved))} of {size_text(plan.bytes_of(made))}"
    return (
        f"strategy {plan.strategy!r}, {place}: saves {len(saved)} of {len(made)} storages, {sizes}"
    )


def _interval_text(plan: PlanRecord, interval: LiveInterval) -> str:
    """A live interval in words: how it begins, and what ends it."""
    num_forward = len(plan.schedule.forward)
    kind = plan.snapshot.storages[interval.storage].kind
    begin = "recomputed" if interval.is_repeated else "made"
    if interval.is_fetched:
        begin = "brought back"
    if kind is StorageKind.TANGENT:
        begin = "given"
    text = f"{begin} at {_position_text(interval.first, num_forward)}"
    if kind.is_result or kind is StorageKind.TANGENT:
        return f"{text}, held by others until the step ends"
    if interval.last == interval.first:
        return f"{text}, released there"
    if interval.is_sent:
        where = _position_text(interval.last, num_forward)
        return f"{text}, released after {where}, when it has been copied out"
    if interval.last not in interval.reads:
        return f"{text}, released when the forward has ended and it is copied to its buffer"
    last = plan.snapshot.ops[plan.schedule.steps[interval.last]].name
    return f"{text}, released after {last} at {_position_text(interval.last, num_forward)}"


def _move_texts(plan: PlanRecord, storage: int) -> tuple[str, ...]:
    """When a storage's copies begin and have to have ended, and what is waited for."""
    lanes = plan.simulation.lanes
    texts = []
    for index, move in enumerate(plan.schedule.moves):
        if move.storage == storage and lanes is not None:
            sent_ms, fetched_ms = lanes.sent_waits_ms[index], lanes.fetched_waits_ms[index]
            texts.append(
                f"to {plan.tier_name}: copied out from step {move.send} on, gone before step "
                f"{move.sent} (the step waits {sent_ms:.3f} ms); copied back from step "
                f"{move.fetch} on, there before step {move.fetched} ({fetched_ms:.3f} ms)"
            )
    return tuple(texts)


def _position_text(position: int, num_forward: int) -> str:
    return f"step {position} ({'forward' if position < num_forward else 'backward'})"
