"""Sets of saved tensors that a frame can make again one by one, by the ops that made them.

Where a forward saves x and f(x), and f is cheap, f(x) need not be held. A set of saved tensors is
made again in one pass over the tape: each op of the forward that it takes runs once, from what is
still held. So the seconds of a set are those of its ops, and what it frees are its storages. Noting
these ops in the forward takes seconds, too, and so does each other op that is seen. Sets grow one
storage at a time, by the least further seconds for each further byte. What no op makes again may be
held as booleans, see `two_valued`; it counts as held for the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rockmate._torch.ops import OpOverload
from rockmate.frames.noting_cost import NotingCost, noting_cost
from rockmate.frames.op_states import OpStates, StatesOfOp
from rockmate.frames.regions import Region, Regions
from rockmate.frames.tape import Recipe


class Packable(NamedTuple):
    """A state that can be held as booleans.

    Attributes:
        state: which.
        freed_bytes: the difference.
        packed_bytes: of the booleans.
        seconds: that it takes, there and back.
    """

    state: int
    freed_bytes: int
    packed_bytes: int
    seconds: float


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
        packable: states that can be held as booleans.
        noting_s: that it took to note an op, as far as the tape can see it.
    """

    ops: tuple[OpOverload, ...]
    states: tuple[StatesOfOp, ...]
    seconds: tuple[float, ...]
    outside: frozenset[int]
    num_bytes: tuple[int, ...]
    own: frozenset[int]
    held: frozenset[int]
    regions: tuple[Region, ...] = ()
    packable: tuple[Packable, ...] = ()
    noting_s: float = 0.0

    @property
    def cost(self) -> NotingCost:
        """Of noting ops and of hooks, in the step that was measured."""
        return noting_cost().as_in_step(self.noting_s)


class Derivation(NamedTuple):
    """Some states that are given up.

    Attributes:
        states: which.
        order: positions of the ops that make them again.
        num_bytes: that this frees.
        seconds: that it takes to make them again.
        extra_bytes: that are live meanwhile, beside all that the frame has saved.
        regions: that are observed; None if all of the frame is.
        packed: further states, which are held as booleans.
    """

    states: frozenset[int]
    order: tuple[int, ...]
    num_bytes: int
    seconds: float
    extra_bytes: int
    regions: Sequence[Region] | None = None
    packed: frozenset[int] = frozenset()


@lru_cache(maxsize=128)
def derivations(frame: TapedFrame, caution: float = 1.0) -> Sequence[Derivation]:
    """Growing sets of states that can be given up.

    Args:
        frame: the tape.
        caution: how much the seconds of observing weigh where the next state is chosen. A set that
            grows with more has the ops of fewer submodules.
    """
    growing = _Growing(frame, caution)
    found: list[Derivation] = []
    while growing.has_grown():
        found.append(growing.derivation())
    return found


class _Growing:
    """A set of states that are given up, which grows by the cheapest bytes."""

    def __init__(self, frame: TapedFrame, caution: float) -> None:
        self._frame, self._ops, self._observed = frame, OpStates(frame.states), _Observed(frame)
        self._caution = caution
        self._present = frame.outside | frame.held
        self._packable = {each.state: each for each in frame.packable}
        self._left = set(frame.own)
        self._chosen, self._packed = frozenset[int](), frozenset[int]()
        self._order: list[int] = []
        self._weighed_s = 0.0

    def has_grown(self) -> bool:
        """Adds a state, if there is another one that can be given up."""
        best: tuple[float, int, list[int] | None] | None = None
        for state in sorted(self._left):
            order = self._order_with(state)
            if order is not None:
                seconds = self._observed.seconds_of(order, self._caution) - self._weighed_s
                freed_bytes = self._frame.num_bytes[state]
            elif state in self._packable:
                _, freed_bytes, _, seconds = self._packable[state]
            else:
                self._left.discard(state)  # nor is it possible with fewer that are held
                continue
            price = seconds / max(1, freed_bytes)
            if best is None or price < best[0]:
                best = price, state, order
        if best is None:
            return False
        _, state, order = best
        self._left.discard(state)
        if order is None:
            self._packed |= {state}
        else:
            self._chosen |= {state}
            self._order = order
            self._weighed_s = self._observed.seconds_of(order, self._caution)
        return True

    def _order_with(self, state: int) -> list[int] | None:
        given_up = self._chosen | {state}
        return self._ops.ops_for(given_up, self._present | (self._frame.own - given_up))

    def derivation(self) -> Derivation:
        """What is given up by now."""
        num_bytes, order = self._frame.num_bytes, self._order
        derived_bytes = sum(num_bytes[each] for each in self._chosen)
        packed = [self._packable[each] for each in self._packed]
        live = self._ops.live_states(order, self._chosen)
        # What is packed is unpacked before ops run, one after the other.
        extra_bytes = (
            max(sum(num_bytes[each] for each in states) for states in live) - derived_bytes
            if order
            else max((each.packed_bytes for each in packed), default=0)
        )
        return Derivation(
            states=self._chosen,
            order=tuple(order),
            num_bytes=derived_bytes + sum(each.freed_bytes for each in packed),
            seconds=self._observed.seconds_of(order) + sum(each.seconds for each in packed),
            extra_bytes=extra_bytes,
            regions=self._observed.regions_of(order),
            packed=self._packed,
        )


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
        self._frame, self._cost = frame, frame.cost
        self._regions = Regions(frame.regions, len(frame.states))

    def regions_of(self, order: Sequence[int]) -> Sequence[Region] | None:
        """The regions that are observed; None if it takes less to observe all."""
        found = self._regions.around(order)
        return found if self._observing_s(found) < self._observing_s(None) else None

    def seconds_of(self, order: Sequence[int], caution: float = 1.0) -> float:
        """All that ops cost that run again."""
        again_s = sum(self._frame.seconds[at] for at in order)
        noted_s = (self._cost.noted_s + self._cost.repeated_s) * len(order)
        return again_s + noted_s + caution * self._observing_s(self.regions_of(order))

    def _observing_s(self, regions: Sequence[Region] | None) -> float:
        if regions is None:
            return self._cost.seen_s * len(self._frame.states)
        seen_s = self._cost.seen_s * sum(each.num_ops for each in regions)
        return seen_s + self._cost.begun_s * len(regions)
