"""Marks on storages: what the user's marks mean for the values of a step.

*save* has been settled before: the op of a saved value has been built to run once, in the forward
(`node_marks.is_saved`), so its value lives to its last read. *recompute* is a property of the
storage: no schedule may have it live across the border between forward and backward.

A mark with a scope, of a submodule or of a checkpointed call, covers values that stay inside of it.
What other parts of the forward read is left to the planner, as a checkpoint leaves its results.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rockmate.errors import MarkError
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.graph.mark_request import Mark, MarkRequest
from rockmate.graph.node_marks import marks_of

logger = logging.getLogger(__name__)
# Number of values that a line in the log names.
_NUM_NAMED = 4


def apply_marks(graph: Graph, _: object) -> Graph:
    """Sets the mark of each storage from those of its nodes.

    Raises:
        MarkError: a value is marked to be saved and to be recomputed; or one that is marked to be
            recomputed cannot be, or is returned by the model.
    """
    kept: list[str] = []
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            continue
        for storage in op.writes:
            marks = _marks_on(op, storage)
            if marks and not _apply(graph, op, storage, marks):
                kept.append(storage.name)
    if kept:
        logger.warning(
            "%d values that patterns mark to be recomputed stay in memory, since the model returns "
            "them or their op must not run twice: %s",
            len(kept),
            ", ".join(kept[:_NUM_NAMED]) + (", ..." if len(kept) > _NUM_NAMED else ""),
        )
    return graph


def log_uncovered(graph: Graph, request: MarkRequest) -> None:
    """Says of each pattern that marks no value what it matches, and why that is not marked."""
    covering = {
        (storage.mark, source) for storage in graph.storages for source in storage.mark_sources
    }
    for word, source in request.uncovered(covering):
        reasons = {
            _reason(graph, op, storage, mark): None
            for op in graph.ops
            for storage in op.writes
            for mark in _marks_on(op, storage)
            if (mark.word, mark.source) == (word, source)
        }
        logger.warning(
            "the mark %r (%s) covers no value: %s",
            source,
            word,
            "; ".join(list(reasons)[:_NUM_NAMED]) or "nothing that it matches has its own memory",
        )


def forced_recomputations(ops: Sequence[Op], readers: Sequence[Op]) -> set[Op]:
    """The ops that run a second time in the backward of every schedule, because of marks.

    They make a marked value that the backward reads, or that such an op reads. Each of them runs
    in the backward at least once.

    Args:
        ops: forward ops, of which the result has some.
        readers: ops of the backward.
    """
    known = set(ops)
    forced: set[Op] = set()
    pending = list(readers)
    while pending:
        for storage in pending.pop().reads:
            maker = storage.producer
            if storage.must_recompute and maker in known and maker not in forced:
                assert maker is not None
                forced.add(maker)
                pending.append(maker)
    return forced


def _apply(graph: Graph, op: Op, storage: Storage, marks: Sequence[Mark]) -> bool:
    """Sets the mark of a storage; False if one that a pattern gives cannot be kept, and matters."""
    saves = [mark for mark in marks if mark.word == "save"]
    recomputes = [
        mark for mark in marks if mark.word == "recompute" and _covers(graph, mark, storage)
    ]
    if saves and recomputes:
        place = f" in {op.module}" if op.module else ""
        msg = (
            f"the marks contradict each other: {saves[0].source!r} saves {storage.name}{place}, "
            f"and {recomputes[0].source!r} recomputes it. Leave one of them out, or make its "
            "pattern narrower."
        )
        raise MarkError(msg)
    if saves:
        storage.mark, storage.mark_sources = "save", _sources(saves)
    elif recomputes and op.phase is Phase.FORWARD:
        fault = _fault(graph, op, storage)
        if not fault:
            storage.mark, storage.mark_sources = "recompute", _sources(recomputes)
        elif any(mark.is_named for mark in recomputes):
            named = next(mark for mark in recomputes if mark.is_named)
            msg = f"{named.source!r} marks {storage.name} to be recomputed, and {fault}."
            raise MarkError(msg)
        else:
            readers = graph.readers.get(storage, ())
            return not any(reader.phase is not Phase.FORWARD for reader in readers)
    return True


def _marks_on(op: Op, storage: Storage) -> list[Mark]:
    return list(dict.fromkeys((*marks_of(op.node), *marks_of(storage.root))))


def _sources(marks: Sequence[Mark]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mark.source for mark in marks))


def _covers(graph: Graph, mark: Mark, storage: Storage) -> bool:
    """Whether all of the forward that reads a storage is in the mark's scope."""
    if mark.scope is None:
        return True
    readers = [reader for reader in graph.readers.get(storage, ()) if reader.phase is Phase.FORWARD]
    return not storage.is_output and all(mark in marks_of(reader.node) for reader in readers)


def _fault(graph: Graph, op: Op, storage: Storage) -> str:
    """Why a storage cannot be out of memory between forward and backward; "" if it can."""
    if storage.is_output:
        return "the model returns it, so its caller holds it. Return a copy, or leave it unmarked"
    if op.recompute_target is None:
        return (
            f"its op {op.name} must not run twice, since it reads what the forward overwrites or "
            "keeps what it makes. Mark a value that is computed from it"
        )
    return ""


def _reason(graph: Graph, op: Op, storage: Storage, mark: Mark) -> str:
    """Why a mark to recompute does not hold for a storage that it matches."""
    if op.phase is not Phase.FORWARD:
        return f"only the backward reads {storage.name}"
    if storage.is_output:
        return f"the model returns {storage.name}"
    if not _covers(graph, mark, storage):
        return f"{storage.name} is read outside of {mark.scope}, and what leaves it is free"
    return f"the op of {storage.name} must not run twice"
