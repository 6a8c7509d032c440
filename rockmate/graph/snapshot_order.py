"""An order of a step's ops and storages that does not depend on the order of the trace.

A model may go through a set of names, as those of transformers do that build a mask or rotary
tables for each type of layer. Its trace then has equal ops in another order in each process. Equal
steps have equal canonical orders up to their indices, so a plan of one can be renumbered for the
other.

Ops are sorted by labels, as in colour refinement (Weisfeiler and Leman, 1968). The first sweep
labels an op by its call and by the labels of what it reads, the second adds who reads its results.
Ops with equal labels stay in the order of the trace.

The order of the trace counts where eager's numbers or the effects of a step depend on it: for ops
that draw, for ops that run once, and for the contributions to one gradient.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, NamedTuple, TypeAlias

# A `StepSnapshot`, whose file imports this one.
_Step: TypeAlias = Any


# Kinds of storages whose order is that of the call or of its outputs.
_PLACED = ("input", "tangent")


class CanonicalOrder(NamedTuple):
    """The order, and the labels behind it.

    Attributes:
        ops: indices of the ops, in canonical order.
        storages: the same of the storages.
        origins: for each op, by index, a label of what it computes from the step's inputs.
    """

    ops: list[int]
    storages: list[int]
    origins: list[str]


def canonical_order(step: _Step) -> CanonicalOrder:
    """The canonical order of a step."""
    made = _labels_of_given(step)
    origins: list[str] = []
    for op, places in zip(step.ops, _places(step), strict=True):
        state = (op.phase, op.is_recomputable, op.is_random, op.state_bytes)
        origin = _label(op.call, state, places, [made[storage] for storage in op.reads])
        origins.append(origin)
        for result, storage in enumerate(op.writes):
            made[storage] = _label(origin, result)
    uses: list[list[str]] = [[] for _ in step.storages]
    for role, storage in step.outputs:
        uses[storage].append(role)
    for storage in step.updates:
        uses[storage].append("update")
    labels = list(origins)
    for index, op in reversed(list(enumerate(step.ops))):
        labels[index] = _label(origins[index], [sorted(uses[storage]) for storage in op.writes])
        for argument, storage in enumerate(op.reads):
            uses[storage].append(_label(labels[index], argument))
    kept = [_label(label, sorted(used)) for label, used in zip(made, uses, strict=True)]
    return CanonicalOrder(_sorted(labels), _sorted(kept), origins)


def _labels_of_given(step: _Step) -> list[str]:
    """Labels of the storages that no op writes: names of parameters and buffers, places of inputs.

    The number of a constant is its place in the trace, and does not count.
    """
    seen: Counter[str] = Counter()
    labels = []
    for storage, names in zip(step.storages, _given_names(step), strict=True):
        kind = storage.kind.value
        labels.append(_label(kind, names, seen[kind] if kind in _PLACED else 0))
        seen[kind] += 1
    return labels


def _places(step: _Step) -> list[Any]:
    """For each op its place among those whose order counts."""
    owner_of: dict[str, str] = {name: names[0] for names in _given_names(step) for name in names}
    seen: Counter[Any] = Counter()

    def place(which: Any) -> int:
        seen[which] += 1
        return seen[which]

    found = []
    for op in step.ops:
        runs_once = op.phase == "forward" and not op.is_recomputable
        own = place("") if op.is_random or runs_once else 0
        names = op.final_gradients
        found.append((own, [(name, place(owner_of.get(name, name))) for name in names]))
    return found


def _given_names(step: _Step) -> list[list[str]]:
    """For each storage the names of the parameters and buffers that it holds, sorted."""
    known = {role.partition(" ")[2] for role, _ in step.inputs}
    return [sorted(known.intersection(storage.aliases)) for storage in step.storages]


def _label(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _sorted(labels: list[str]) -> list[int]:
    return sorted(range(len(labels)), key=labels.__getitem__)
