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

from rockmate._torch.ops import OpOverload
from rockmate.frames.noting_cost import noting_cost
from rockmate.frames.op_states import OpStates, StatesOfOp


class TapedFrame(NamedTuple):
    """The tape of a measured frame, by states.

    Attributes:
        ops: of the forward.
        states: what each of them reads and makes.
        seconds: of each op.
        outside: states of tensors from outside of the frame.
        num_bytes: of each state.
        own: states that the frame alone holds.
        held: states of other saved tensors.
    """

    ops: tuple[OpOverload, ...]
    states: tuple[StatesOfOp, ...]
    seconds: tuple[float, ...]
    outside: frozenset[int]
    num_bytes: tuple[int, ...]
    own: frozenset[int]
    held: frozenset[int]


class Derivation(NamedTuple):
    """Some states that are given up.

    Attributes:
        states: which.
        order: positions of the ops that make them again.
        num_bytes: that this frees.
        seconds: that it takes to make them again.
        extra_bytes: that are live meanwhile, beside all that the frame has saved.
    """

    states: frozenset[int]
    order: tuple[int, ...]
    num_bytes: int
    seconds: float
    extra_bytes: int


@lru_cache(maxsize=64)
def derivations(frame: TapedFrame) -> Sequence[Derivation]:
    """Growing sets of states that can be given up."""
    ops, num_bytes = OpStates(frame.states), frame.num_bytes
    present = frame.outside | frame.held
    left, chosen = set(frame.own), frozenset[int]()
    seconds, freed = 0.0, 0
    found: list[Derivation] = []
    while left:
        best: tuple[float, int, float, list[int]] | None = None
        for state in sorted(left):
            given_up = chosen | {state}
            order = ops.ops_for(given_up, present | (frame.own - given_up))
            if order is None:
                left.discard(state)  # nor is it possible with fewer that are held
                continue
            total = sum(frame.seconds[at] for at in order)
            price = (total - seconds) / max(1, num_bytes[state])
            if best is None or price < best[0]:
                best = price, state, total, order
        if best is None:
            break
        _, state, seconds, order = best
        left.discard(state)
        chosen |= {state}
        freed += num_bytes[state]
        live_bytes = max(
            sum(num_bytes[each] for each in live) for live in ops.live_states(order, chosen)
        )
        cost = noting_cost()
        noted_s = cost.seen_s * len(frame.ops) + cost.noted_s * len(order)
        extra_bytes = live_bytes - freed
        found.append(Derivation(chosen, tuple(order), freed, seconds + noted_s, extra_bytes))
    return found
