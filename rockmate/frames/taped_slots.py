"""The saved tensors of a frame beside its tape: which of them ops make again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rockmate._torch.storage import version_of
from rockmate.errors import UnsupportedModelError
from rockmate.frames.derivation import Packable, TapedFrame
from rockmate.frames.regions import PartKey, Region
from rockmate.frames.saved import Saved
from rockmate.frames.tape import Tape
from rockmate.frames.two_valued import TwoValued
from rockmate.frames.views import View

_LEAST_PACKED_BYTES = 1 << 16
"""Of a tensor that is worth holding as booleans."""


class TapedSlots:
    """The states and views of the saved tensors of one frame.

    Attributes:
        tape: of the frame.
        states: of the storage of each saved tensor.
    """

    def __init__(self, tape: Tape) -> None:
        """Nothing is saved yet."""
        self.tape, self.states = tape, list[int]()
        self._views: dict[int, View] = {}  # of slots that may be given up
        self._answers: dict[Set[int], bool] = {}

    def observing(self, key: PartKey | None) -> AbstractContextManager[Any]:
        """Has ops observed within a call of a submodule, or in all of the frame, if they are to be.

        Args:
            key: of the call; None for the frame.
        """
        regions = self.tape.regions
        is_observed = not regions if key is None else key in regions
        return self.tape.observing() if is_observed else nullcontext()

    def note(self, tensor: torch.Tensor) -> None:
        """A tensor is saved."""
        self.states.append(self.tape.state_of(tensor))

    def can_make(self, slots: frozenset[int], present: Callable[[], Mapping[int, Saved]]) -> bool:
        """Whether the ops of this run, which may be others than those measured, make slots again.

        Args:
            slots: positions of saved tensors.
            present: gives those that are in memory, by their positions.
        """
        if slots not in self._answers:  # asked whenever a frame is chosen
            known = present()
            self._answers[slots] = max(slots) < len(self.states) and self.tape.can_make(
                {self.states[index] for index in slots}, self._held(slots, known)
            )
            for index in slots & known.keys():
                self._views[index] = View.of(known[index].tensor)
        return self._answers[slots]

    def make(self, slots: Set[int], present: Mapping[int, Saved]) -> dict[int, Saved]:
        """Saved tensors that are made again.

        Args:
            slots: their positions.
            present: others that are in memory.
        """
        wanted = {self.states[index] for index in slots}
        made = self.tape.make(wanted, self._held(slots, present))
        return {index: Saved.of(self._viewed(index, made[self.states[index]])) for index in slots}

    def _viewed(self, index: int, made: torch.Tensor) -> torch.Tensor:
        """A saved tensor, as a view of its state that was made again."""
        return self.tape.viewed(made, self.states[index], self._views[index])

    def _held(self, but: Set[int], present: Mapping[int, Saved]) -> dict[int, Saved]:
        """States that are in memory, without those of some slots."""
        return {
            self.states[index]: saved
            for index, saved in present.items()
            if index not in but and version_of(saved.tensor) == saved.version
        }

    def wrong_ops(self, present: Mapping[int, Saved]) -> frozenset[int]:
        """Positions of ops that do not make again what was saved, bit for bit.

        Not all that changes memory is an op: a kernel of somebody else's, NumPy.

        Args:
            present: all saved tensors, by their positions.
        """
        wrong: set[int] = set()
        for index, saved in present.items():
            state = self.states[index]
            alike = {each for each in present if self.states[each] == state}
            held = self._held(alike, present)
            self._views[index] = View.of(saved.tensor)
            order = self.tape.ops_for({state}, held.keys())
            if order is not None and wrong.isdisjoint(order):
                try:
                    again = self._viewed(index, self.tape.make({state}, held)[state])
                except UnsupportedModelError:
                    again = None
                if again is None or not torch.equal(again, saved.tensor):
                    wrong.update(order)
        return frozenset(wrong)

    def profile(
        self,
        own: Mapping[int, int],
        present: Mapping[int, Saved],
        wrong_ops: Set[int],
        regions: Sequence[Region],
    ) -> TapedFrame:
        """The tape by states.

        Args:
            own: storages that the frame alone holds.
            present: saved tensors, by their positions.
            wrong_ops: positions of ops that make nothing again.
            regions: the calls within the frame.
        """
        saved = [(state, present.get(index)) for index, state in enumerate(self.states)]
        held = {state for state, each in saved if each is None or each.storages[0] not in own}
        return TapedFrame(
            ops=self.tape.ops,
            states=tuple(
                op._replace(can_repeat=op.can_repeat and at not in wrong_ops)
                for at, op in enumerate(self.tape.states_of_ops)
            ),
            seconds=tuple(self.tape.seconds),
            outside=self.tape.outside_states,
            num_bytes=tuple(self.tape.num_bytes),
            own=frozenset(state for state, _ in saved if state not in held),
            held=frozenset(held),
            regions=tuple(regions),
            packable=tuple(self._packable(own, present)),
            noting_s=self.tape.noting_s / max(1, self.tape.num_ops),
        )

    def _packable(self, own: Mapping[int, int], present: Mapping[int, Saved]) -> Iterator[Packable]:
        """States of one large saved tensor that no op makes again, and that has two values."""
        counts = Counter(self.states)
        for index, saved in present.items():
            state = self.states[index]
            num_bytes = own.get(saved.storages[0], 0)
            if counts[state] > 1 or num_bytes < _LEAST_PACKED_BYTES:
                continue
            if self.tape.ops_for({state}, self._held({index}, present).keys()) is not None:
                continue
            begin = self.tape.clock()
            packed = TwoValued.of(saved)
            if packed is not None:
                seconds = self.tape.clock() - begin + packed.unpacking_s(self.tape.clock)
                packed_bytes = packed.is_set.nbytes
                yield Packable(state, num_bytes - packed_bytes, packed_bytes, seconds)
