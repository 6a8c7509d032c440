"""The calls that steps consist of: their order, what they save, and what is decided for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace

from rockmate.frames.ahead import Decision, KnownFrame, bound_s, decide
from rockmate.frames.menu import ALL_TENSORS, Offer, offer_of_way
from rockmate.frames.menus import Menus
from rockmate.frames.needs import FrameKey, Needs, StepNeeds, merged

_REMEMBERED_STEPS = 16
_SHARES = 16
"""Shares of steps are rounded to one of so many, so that not each step is decided for anew."""
_SIZES_PER_UNIT = 16
"""Steps smaller than the recorded one are decided for as if they were of the next larger of so many
sizes."""


class KnownCalls:
    """Calls of the last steps, in their order.

    Where a step has other calls than the one before, all of those of the last steps are taken for
    one step, and those that not all of them had count by the share of these steps in which one of
    them comes.
    """

    def __init__(self) -> None:
        self._order: list[FrameKey] = []
        self._steps: deque[frozenset[FrameKey]] = deque(maxlen=_REMEMBERED_STEPS)
        self._share = 1.0  # of steps, in which a call comes that not all of them have
        self._constant: frozenset[FrameKey] = frozenset()
        self._present: list[FrameKey] = []
        self._state: object = None
        # Bytes that calls of a path save, by the sizes of their inputs; None if they vary.
        self._saved: dict[tuple[FrameKey, Hashable], int | None] = {}
        self._decisions: dict[tuple[int, ...], Decision] = {}

    def begin_step(self, state: object) -> None:
        """Takes the calls of the step before; forgets what they save if the state is another."""
        order = merged(self._order, self._present)
        if self._present:
            self._steps.append(frozenset(self._present))
        seen = frozenset[FrameKey]().union(*self._steps)
        order = [key for key in order if key in seen]
        constant = seen.intersection(*self._steps)
        num_varying = len(self._steps) * len(seen - constant)
        num_seen = sum(len(step - constant) for step in self._steps)
        share = round(_SHARES * num_seen / num_varying) / _SHARES if num_varying else 1.0
        if (order, constant, share) != (self._order, self._constant, self._share):
            self._order, self._constant, self._share = order, constant, share
            self._decisions.clear()
        self._present = []
        if state != self._state:
            self._state = state
            self._saved.clear()

    @property
    def present(self) -> Sequence[FrameKey]:
        """Calls of the present step so far."""
        return self._present

    def bound_s(self, needs: StepNeeds, menus: Menus, budget_bytes: int) -> float | None:
        """Seconds below which no choices make again what the calls of this step give up."""
        return bound_s(self._frames_of(self._present, needs, menus), budget_bytes)

    def note(self, key: FrameKey) -> None:
        """A call of the present step begins."""
        self._present.append(key)

    def note_saved(self, key: FrameKey, sizes: Hashable, num_bytes: int) -> None:
        """What a call has saved."""
        known = self._saved.setdefault((key, sizes), num_bytes)
        if known != num_bytes:
            self._saved[key, sizes] = None

    def saved_bytes(self, key: FrameKey, sizes: Hashable) -> int | None:
        """What a call saves, if it always was the same; None if it varies or is not known."""
        return self._saved.get((key, sizes))

    def decision(self, needs: StepNeeds, menus: Menus, budget_bytes: int, scale: float) -> Decision:
        """What is decided for the known calls.

        Args:
            needs: of a recorded step.
            menus: what calls may give up.
            budget_bytes: for this step.
            scale: its size relative to the recorded one.
        """
        size = max(1, math.ceil(scale * _SIZES_PER_UNIT))
        least, number = needs.minimum_bytes, needs.ways_number
        question = (budget_bytes, size, menus.version, least, number)
        if question not in self._decisions:
            frames = self.known_frames(needs, menus)
            found = decide(frames, budget_bytes * _SIZES_PER_UNIT // size)
            self._decisions[question] = found or Decision()
        return self._decisions[question]

    def known_frames(self, needs: StepNeeds, menus: Menus) -> list[KnownFrame]:
        """The known calls, with what they need and may give up."""
        frames = self._frames_of(self._order, needs, menus)
        return [
            each if each.key in self._constant else replace(each, share=self._share)
            for each in frames
        ]

    def _frames_of(
        self, keys: Sequence[FrameKey], needs: StepNeeds, menus: Menus
    ) -> list[KnownFrame]:
        return [_known_frame(key, needs.of(key), menus) for key in keys]

    def forget(self) -> None:
        """Other calls will be frames."""
        self._order, self._present = [], []
        self._steps.clear()
        self._decisions.clear()


def _known_frame(key: FrameKey, needs: Needs, menus: Menus) -> KnownFrame:
    """A frame with its choices.

    Beside ways there is only one that runs as in eager: its peak may be the smallest.
    """
    everything = _everything(needs)
    if not needs.ways:
        return KnownFrame(key, needs, menus.choices_of(key) or (everything,), menus.hooks_s(key))
    ways = [
        offer_of_way(way, needs.saved_bytes, number=number, peak_bytes=needs.peak_of(way))
        for number, way in enumerate(needs.ways)
    ]
    return KnownFrame(key, needs, (everything, *ways), menus.hooks_s(key))


def _everything(needs: Needs) -> Offer:
    """The offer of a frame that has not been measured: its path has not run in these steps."""
    return Offer(needs.saved_bytes, needs.seconds, frozenset(), ALL_TENSORS)
