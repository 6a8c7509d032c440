"""Ops by the states of storages that they read and make, and which of them make a state again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple


class StatesOfOp(NamedTuple):
    """What an op reads and makes.

    Attributes:
        inputs: states that it reads.
        outputs: states that it makes.
        rewritten: for what it writes in place, the state before and the state after.
        can_repeat: whether a second run gives the same.
    """

    inputs: frozenset[int]
    outputs: tuple[int, ...]
    rewritten: tuple[tuple[int, int], ...]
    can_repeat: bool

    @property
    def all_outputs(self) -> tuple[int, ...]:
        """States that are there when it has run, and not before."""
        return (*self.outputs, *(after for _, after in self.rewritten))


class OpStates:
    """The ops of a forward, in their order."""

    def __init__(self, ops: Sequence[StatesOfOp]) -> None:
        self._ops = ops
        self._maker = {state: at for at, op in enumerate(ops) for state in op.all_outputs}

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
                missing += {before for before, _ in op.rewritten} | (op.inputs - held)
        return sorted(positions)

    def live_states(self, order: Sequence[int], wanted: Set[int]) -> Iterator[set[int]]:
        """While each of some ops runs in order, the states that are made so far and needed yet."""
        last_use = {state: at for at in order for state in self._ops[at].inputs}
        live: set[int] = set()
        for at in order:
            op = self._ops[at]
            live.difference_update(before for before, _ in op.rewritten)
            live.update(op.all_outputs)
            yield live
            live = {each for each in live if each in wanted or last_use.get(each, -1) > at}
