"""Sets of saved tensors that a frame can make again one by one, by the ops that made them.

Where a forward saves x and f(x), and f is cheap, f(x) need not be held. A set of saved tensors is
made again in one pass over the tape: each op of the forward that it takes runs once, from what is
still held. So the seconds of a set are those of its ops, and what it frees are its storages. Sets
grow one storage at a time, by the least further seconds for each further byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rockmate.frames.op_states import OpStates, StatesOfOp

_NOTED_OP_S = 2e-5
"""Seconds that it takes to note an op."""


class TapedFrame(NamedTuple):
    """The tape of a measured frame, by states.

    Attributes:
        ops: what each op reads and makes.
        seconds: of each op.
        outside: states of tensors from outside of the frame.
        num_bytes: for each state that the frame alone holds, those of its storage.
        held: states of other saved tensors.
    """

    ops: tuple[StatesOfOp, ...]
    seconds: tuple[float, ...]
    outside: frozenset[int]
    num_bytes: tuple[tuple[int, int], ...]
    held: frozenset[int]


class Derivation(NamedTuple):
    """Some states, what it frees to give them up, and what it takes to make them again."""

    states: frozenset[int]
    num_bytes: int
    seconds: float


@lru_cache(maxsize=64)
def derivations(frame: TapedFrame) -> Sequence[Derivation]:
    """Growing sets of states that can be given up."""
    graph = OpStates(frame.ops)

    def seconds_of(states: frozenset[int], held: frozenset[int]) -> float | None:
        order = graph.ops_for(states, held)
        return None if order is None else sum(frame.seconds[at] for at in order)

    noted_s = _NOTED_OP_S * len(frame.ops)
    num_bytes = dict(frame.num_bytes)
    present = frame.outside | frame.held
    left, chosen = set(num_bytes), frozenset[int]()
    seconds, freed = 0.0, 0
    found: list[Derivation] = []
    while left:
        best: tuple[float, int, float] | None = None
        for state in sorted(left):
            given_up = chosen | {state}
            total = seconds_of(given_up, present | (num_bytes.keys() - given_up))
            if total is None:
                left.discard(state)  # nor is it possible with fewer that are held
                continue
            price = (total - seconds) / num_bytes[state]
            if best is None or price < best[0]:
                best = price, state, total
        if best is None:
            break
        _, state, seconds = best
        left.discard(state)
        chosen |= {state}
        freed += num_bytes[state]
        found.append(Derivation(chosen, freed, seconds + noted_s))
    return found
