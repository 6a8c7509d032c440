"""The calls that steps consist of: their order, what they save, and what is decided for them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable, Sequence

from rockmate.frames.knapsack import Decision, KnownFrame, Option, bound_s, decide
from rockmate.frames.needs import FrameKey, Needs, StepNeeds, merged
from rockmate.frames.schedule_cost import ScheduleCost

_REMEMBERED_STEPS = 16
_SHARES = 16
"""Shares of steps are rounded to one of so many, so that not each step is decided for anew."""
_DECIDING_SHARE, _DECIDING_S = 1 / 16, 1.0
"""What decisions take at most: a share of the time of steps, and seconds beside."""
_MOST_DECISIONS = 64
"""That are remembered."""
_SIZES_PER_UNIT = 16
"""Steps smaller than the recorded one are decided for as if they were of the next larger of so many
sizes."""


class CallHistory:
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
        self._last = Decision()
        self._decisions_s, self._begin_s = 0.0, math.inf  # seconds of all; when the first one was

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

    def bound_s(self, needs: StepNeeds, budget_bytes: int) -> float | None:
        """Lower bound on the recompute time of this step, in seconds."""
        frames = [_known_frame(key, needs.of(key), 1.0) for key in self._present]
        return bound_s(frames, budget_bytes)

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

    def decision(
        self, needs: StepNeeds, budget_bytes: int, scale: float, now_s: float | None
    ) -> Decision:
        """What is decided for the known calls.

        Steps that all have other calls or sizes would be decided for anew each time. Decisions take
        a share of the time of steps at most; where they have taken more, the last one stays, and
        what does not fit is dropped when it comes to that.

        Args:
            needs: of a recorded step.
            budget_bytes: for this step.
            scale: its size relative to the recorded one.
            now_s: the time; None if decisions must not depend on it.
        """
        size = max(1, math.ceil(scale * _SIZES_PER_UNIT))
        question = (budget_bytes, size, needs.minimum_bytes, needs.schedules_number)
        found = self._decisions.get(question)
        if found is None and self._may_decide(now_s):
            begin_s = time.perf_counter()
            found = decide(self.known_frames(needs), budget_bytes * _SIZES_PER_UNIT // size)
            found = self._last = self._decisions[question] = found or Decision()
            self._decisions_s += time.perf_counter() - begin_s
            while len(self._decisions) > _MOST_DECISIONS:
                del self._decisions[next(iter(self._decisions))]
        return self._last if found is None else found

    def _may_decide(self, now_s: float | None) -> bool:
        """Whether steps have taken so long that another decision is cheap beside them."""
        if now_s is None:
            return True
        self._begin_s = min(self._begin_s, now_s)
        return self._decisions_s <= _DECIDING_S + _DECIDING_SHARE * (now_s - self._begin_s)

    def known_frames(self, needs: StepNeeds) -> list[KnownFrame]:
        """The known calls, with their needs and options."""
        return [
            _known_frame(key, needs.of(key), 1.0 if key in self._constant else self._share)
            for key in self._order
        ]

    def forget(self) -> None:
        """Other calls will be frames."""
        self._order, self._present = [], []
        self._steps.clear()
        self._decisions.clear()
        self._last = Decision()


def _known_frame(key: FrameKey, needs: Needs, share: float) -> KnownFrame:
    """A frame with its options: to drop all, whose peak may be the smallest, and its schedules."""
    everything = Option(needs.saved_bytes, needs.seconds)
    schedules = [
        option_of(schedule, needs.saved_bytes, number=number, peak_bytes=needs.peak_of(schedule))
        for number, schedule in enumerate(needs.schedules)
    ]
    return KnownFrame(
        key, needs, (everything, *schedules) if needs.saved_bytes else schedules, share
    )


def option_of(
    schedule: ScheduleCost, saved_bytes: int, *, number: int | None = None, peak_bytes: int = 0
) -> Option:
    """The option of one schedule of a captured frame.

    Args:
        schedule: which.
        saved_bytes: by its forward as in eager.
        number: of the schedule.
        peak_bytes: of the frame's forward and backward.
    """
    return Option(saved_bytes - schedule.held_bytes, schedule.seconds, number, peak_bytes)
