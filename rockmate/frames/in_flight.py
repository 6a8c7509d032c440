"""Steps whose forward has run and whose backward has not: what they hold beside their frames.

A script may run several forwards before their backwards: two views of a batch, the parts of a
pipeline. What one of them has live outside of frames stays while the next ones run. And what a
captured inside or a kept frame holds cannot be dropped for those, so each step leaves as much as
it takes to all that are to come.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from rockmate._torch.engine import after_backward
from rockmate.frames.needs import FrameKey, ScheduleCost

REMEMBERED = 16
"""Steps by which it is known how many forwards run before their backwards."""
_MOST_DIFFERENTIATED = 4
"""Steps whose gradients are differentiated before a backward of these is no more waited for."""


class Step:
    """One forward. Its frames hold it, or without any its graph.

    Attributes:
        outside_bytes: live when it has ended, beside what frames hold.
        first_order: of its first frame that has saved something.
        is_over: whether its backward has run.
        has_begun: whether one has run through some of its frames.
    """

    def __init__(self, outside_bytes: int) -> None:
        """Has no frames yet."""
        self.outside_bytes, self.is_over, self.has_begun = outside_bytes, False, False
        self.first_order: int | None = None


class StepsInFlight:
    """The steps of one model.

    Attributes:
        present: the one whose forward runs.
        has_backward: whether a backward has begun since a forward did.
    """

    def __init__(self) -> None:
        """No step yet."""
        self.present, self.has_backward = Step(0), False
        self._running = weakref.ref(self.present)  # of which a frame runs forward or backward
        self._steps: list[weakref.ref[Step]] = []
        self._num_before: deque[int] = deque([0, 0], maxlen=REMEMBERED)
        self._passed = weakref.WeakSet[Step]()  # a forward has begun since their backward
        self._goes_back = False  # whether one of them had another backward
        self._differentiated = weakref.WeakSet[Step]()
        self._num_differentiated = 0

    def begin(self, outside_bytes: int) -> None:
        """A forward begins; see `Step` for the argument.

        Frames of steps before without a backward, as of outputs that the loss does not read, do not
        count if those of no step had a later one.
        """
        for each in self._steps:
            if (step := each()) and step.has_begun and not self._goes_back:
                step.is_over = True
                self._passed.add(step)
        self.present, self.has_backward = Step(outside_bytes), False
        self.run(self.present)
        self._num_before.append(self._num_live())
        self._steps.append(weakref.ref(self.present))

    def undo(self) -> None:
        """The last forward was undone. Somebody may hold its graph all the same."""
        self._steps.pop()
        self._num_before.pop()

    def end(self) -> Step:
        """The forward has run. From now on frames alone, or the caller, hold the step."""
        ended, self.present = self.present, Step(0)
        return ended

    def begin_backward(self, step: Step, at_end: Callable[[], object], _: Any) -> None:
        """The backward begins of a step without frames; `at_end` is called when it has run."""
        step.is_over = self.has_backward = True
        after_backward(at_end)

    def note_backward(self, step: Step, is_last: bool, *, is_differentiated: bool) -> None:
        """The backward of a frame begins: the last one of its step, or one of many."""
        self.run(step)
        self._goes_back |= step in self._passed
        step.is_over |= is_last
        if not is_differentiated:
            step.has_begun, self.has_backward, self._num_differentiated = True, True, 0
        elif step not in self._differentiated:
            self._differentiated.add(step)
            self._num_differentiated += 1
        self.has_backward |= self._num_differentiated > _MOST_DIFFERENTIATED

    @property
    def num_together(self) -> int:
        """How many forwards have run since the last backward, whose own is to come."""
        return 0 if self.has_backward else self._num_live()

    def run(self, step: Step) -> None:
        """A frame of a step runs forward or backward."""
        self._running = weakref.ref(step)

    @property
    def other_bytes(self) -> int:
        """That steps have live outside of frames, beside the one that runs."""
        if len(self._steps) < 2:
            return 0
        steps = [step for each in self._steps if (step := each()) is not None]
        running = self._running()
        return sum(each.outside_bytes for each in steps if each is not running and not each.is_over)

    def _num_live(self) -> int:
        self._steps = [each for each in self._steps if (step := each()) and not step.is_over]
        return len(self._steps)

    @property
    def has_more(self) -> bool:
        """Whether more steps are in flight now than when any of those before began."""
        return self._num_live() > max(self._num_before)

    def most_beside(self, after_bytes: int, *, counts_one: bool) -> int:
        """Bytes of the steps beside which one has run, or several, each with so many at its end."""
        return sorted(self._num_before)[-1 if counts_one else -2] * after_bytes

    def share(self, left_bytes: int, *, least_bytes: int, after_bytes: int) -> int:
        """Of what is left, what the present step may take.

        Args:
            left_bytes: of the budget, by what frames of other steps hold.
            least_bytes: that a step takes that holds nothing.
            after_bytes: that one has live when it has ended.
        """
        left_bytes -= self.other_bytes + (self.num_to_come - 1) * after_bytes
        return min(left_bytes, least_bytes + (left_bytes - least_bytes) // self.num_to_come)

    @property
    def num_to_come(self) -> int:
        """Steps that run before the next backward, by those before: the present one, others."""
        return 1 + max(self._num_before) - self._num_before[-1]


class Running(Protocol):
    """What a frame tells of itself to those that count and decide."""

    key: FrameKey
    order: int
    step: Step

    @property
    def num_bytes(self) -> int: ...  # noqa: D102
    @property
    def schedule(self) -> ScheduleCost | None: ...  # noqa: D102
    def take_back(self) -> None: ...  # noqa: D102


class Droppable(Running, Protocol):
    """See `rockmate.frames.frame.Frame`."""

    seconds: float

    @property
    def can_be_dropped(self) -> bool: ...  # noqa: D102
    def drop(self) -> None: ...  # noqa: D102
