"""Sets of saved tensors that a frame can make again one by one, by the ops that made them.

Where a forward saves x and f(x), and f is cheap, f(x) need not be held. A set of saved tensors is
made again in one pass over the tape: each op of the forward that it takes runs once, from what is
still held. So the seconds of a set are those of its ops, and what it frees are its storages. Noting
these ops in the forward takes seconds, too, and so does each other op that is seen. Sets grow one
storage at a time, by the least further seconds for each further byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rockmate._torch.ops import OpOverload
from rockmate.frames.noting_cost import noting_cost
from rockmate.frames.op_states import OpStates, StatesOfOp
from rockmate.frames.regions import Region, Regions
from rockmate.frames.tape import Recipe


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
        regions: calls of submodules, by the ops within.
    """

    ops: tuple[OpOverload, ...]
    states: tuple[StatesOfOp, ...]
    seconds: tuple[float, ...]
    outside: frozenset[int]
    num_bytes: tuple[int, ...]
    own: frozenset[int]
    held: frozenset[int]
    regions: tuple[Region, ...] = ()


class Derivation(NamedTuple):
    """Some states that are given up.

    Attributes:
        states: which.
        order: positions of the ops that make them again.
        num_bytes: that this frees.
        seconds: that it takes to make them again.
        extra_bytes: that are live meanwhile, beside all that the frame has saved.
        regions: that are observed; None if all of the frame is.
    """

    states: frozenset[int]
    order: tuple[int, ...]
    num_bytes: int
    seconds: float
    extra_bytes: int
    regions: Sequence[Region] | None = None


@lru_cache(maxsize=64)
def derivations(frame: TapedFrame) -> Sequence[Derivation]:
    """Growing sets of states that can be given up."""
    ops, num_bytes = OpStates(frame.states), frame.num_bytes
    present = frame.outside | frame.held
    left, chosen = set(frame.own), frozenset[int]()
    observed, seconds, freed = _Observed(frame), 0.0, 0
    found: list[Derivation] = []
    while left:
        best: tuple[float, int, float, list[int]] | None = None
        for state in sorted(left):
            given_up = chosen | {state}
            order = ops.ops_for(given_up, present | (frame.own - given_up))
            if order is None:
                left.discard(state)  # nor is it possible with fewer that are held
                continue
            total = observed.seconds_of(order)
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
        extra_bytes, regions = live_bytes - freed, observed.regions_of(order)
        found.append(
            Derivation(chosen, tuple(order), freed, seconds, extra_bytes, regions)
        )
    return found


def recipe_of(frame: TapedFrame, derivation: Derivation) -> Recipe:
    """What is observed and noted for a derivation."""
    regions = derivation.regions
    if regions is None:
        return Recipe(frame.ops, frozenset(derivation.order))
    seen = [at for each in regions for at in range(each.begin, each.end)]
    places = {at: place for place, at in enumerate(seen)}
    return Recipe(
        ops=tuple(frame.ops[at] for at in seen),
        noted=frozenset(places[at] for at in derivation.order),
        regions=frozenset(each.key for each in regions),
    )


class _Observed:
    """What it takes to run ops of a frame again, and to note them before."""

    def __init__(self, frame: TapedFrame) -> None:
        self._frame, self._cost = frame, noting_cost()
        self._regions = Regions(frame.regions, len(frame.states))

    def regions_of(self, order: Sequence[int]) -> Sequence[Region] | None:
        """The regions that are observed; None if it takes less to observe all."""
        found = self._regions.around(order)
        return found if self._observing_s(found) < self._observing_s(None) else None

    def seconds_of(self, order: Sequence[int]) -> float:
        """All that ops cost that run again."""
        again_s = sum(self._frame.seconds[at] for at in order)
        noted_s = self._cost.noted_s * len(order)
        return again_s + noted_s + self._observing_s(self.regions_of(order))

    def _observing_s(self, regions: Sequence[Region] | None) -> float:
        if regions is None:
            return self._cost.seen_s * len(self._frame.states)
        seen_s = self._cost.seen_s * sum(each.num_ops for each in regions)
        return seen_s + self._cost.begun_s * len(regions)
