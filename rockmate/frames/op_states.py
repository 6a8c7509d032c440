"""Ops by the states of storages that they read and make, and which of them make a state again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple


class StatesOfOp(NamedTuple):
    """What an op reads and makes.

    Attributes:
        inputs: states that it reads.
        written: those of them that it writes in place.
        outputs: states that it makes; what it has written is a new state.
        can_repeat: whether a second run gives the same.
    """

    inputs: frozenset[int]
    written: frozenset[int]
    outputs: tuple[int, ...]
    can_repeat: bool


class OpStates:
    """The ops of a forward, in their order."""

    def __init__(self, ops: Sequence[StatesOfOp]) -> None:
        self._ops = ops
        self._maker = {state: at for at, op in enumerate(ops) for state in op.outputs}

    def ops_for(self, wanted: Iterable[int], held: Set[int]) -> list[int] | None:
        """Positions of the ops that make some states again, in their order; None if they cannot.

        Args:
            wanted: states to make; held or not.
            held: states that are in memory, those from outside too.
        """
        positions: set[int] = set()
        missing = list(wanted)
        while missing:
            at = self._maker.get(missing.pop())
            if at is None or not self._ops[at].can_repeat:
                return None
            if at not in positions:
                positions.add(at)
                # What an op writes in place is made anew for it: that in memory has been written.
                op = self._ops[at]
                missing += op.written | (op.inputs - held)
        return sorted(positions)
