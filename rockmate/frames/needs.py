"""What a step needs beside what frames hold: measured in a step that holds nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rockmate.frames.agreement import Agreement
from rockmate.frames.schedule_cost import ScheduleCost

_PEAK_TOLERANCE = 1.01
"""A peak that is so much larger than the smallest is not taken for it."""
MOST_PLANNED = 256
"""Frames of a step of which insides are captured: what is known of each pair of them counts."""


class FrameKey(NamedTuple):
    """Which call of which submodule a frame is, within one call of the model."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path} (call {self.number + 1})"


@dataclass(slots=True)
class Needs:
    """Peaks around one frame in a step that holds nothing, in bytes.

    Attributes:
        forward_bytes: while its forward runs.
        after_bytes: from there to the next frame, or to the first backward.
        backward_bytes: while it is recomputed and its backward runs, up to the next one's.
        saved_bytes: what it saves.
        seconds: recompute time.
        before_forward_bytes: live when its forward begins.
        before_backward_bytes: live when its backward begins.
        output_bytes: of all these, of outputs that captured insides read again.
        schedules: of its captured inside, if it has one.
    """

    forward_bytes: int = 0
    after_bytes: int = 0
    backward_bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0
    before_forward_bytes: int = 0
    before_backward_bytes: int = 0
    output_bytes: int = 0
    schedules: Sequence[ScheduleCost] = ()

    @property
    def peak_bytes(self) -> int:
        """The largest of the peaks."""
        return max(self.forward_bytes, self.after_bytes, self.backward_bytes)

    def peak_of(self, schedule: ScheduleCost) -> int:
        """The largest peak of its forward and backward, by a schedule."""
        return max(
            self.before_forward_bytes + schedule.forward_bytes,
            self.before_backward_bytes + schedule.backward_bytes,
        )

    def add(self, num_bytes: int) -> None:
        """Counts what is in memory beside all that was measured."""
        self.forward_bytes += num_bytes
        self.after_bytes += num_bytes
        self.backward_bytes += num_bytes
        self.before_forward_bytes += num_bytes
        self.before_backward_bytes += num_bytes

    def least_before(self, after_bytes: int, *, only_schedules: bool = False) -> int:
        """Bytes without which neither it nor what follows can run.

        Args:
            after_bytes: that what follows takes at least.
            only_schedules: whether it runs by one of its schedules, if there are any.
        """
        found = [
            max(self.peak_of(schedule), schedule.held_bytes + after_bytes)
            for schedule in self.schedules
        ]
        if not (found and only_schedules):
            found.append(max(self.forward_bytes, self.backward_bytes, after_bytes))
        return min(found)


@dataclass(slots=True)
class StepNeeds:
    """The needs of the frames of a recorded step, in the order of their forwards.

    Calls of later steps that were not recorded take their place among them, so that these are the
    needs of one step that has all calls.

    Attributes:
        by_key: of each call.
        num_elements: of the inputs of the step.
        schedules_number: which schedules the calls have; 0 for none.
        has_new_calls: whether calls have been added that ranks have not agreed on.
        new_bytes: that calls of the present step take which were not recorded, until `settle`.
        without_backward: calls whose backward did not run in the step.
        without_outputs: for a call, itself and others before it, if their outputs were free when it
            ran. They are not where a backward of a captured inside is to read them.
    """

    by_key: dict[FrameKey, Needs] = field(default_factory=dict)
    num_elements: int = 0
    schedules_number: int = 0
    has_new_calls: bool = False
    new_bytes: int = 0
    without_backward: frozenset[FrameKey] = frozenset()
    without_outputs: Mapping[FrameKey, Set[FrameKey]] = field(default_factory=dict)
    _of_paths: dict[str, Needs] = field(default_factory=dict)
    _new: dict[FrameKey, tuple[FrameKey | None, int]] = field(default_factory=dict)
    _taken: set[FrameKey] = field(default_factory=set)
    _least: tuple[int, dict[FrameKey, int]] | None = None

    @property
    def minimum_bytes(self) -> int:
        """The smallest peak: of a step that holds nothing but what captured insides have to."""
        return self._least_of_all()[0]

    @property
    def outside_bytes(self) -> int:
        """The peak without all that frames themselves take."""
        return max(
            max(needs.before_forward_bytes, needs.before_backward_bytes, needs.after_bytes)
            for needs in self.by_key.values()
        )

    @property
    def end_bytes(self) -> int:
        """What is live when the forward has ended, if it holds nothing."""
        return next(reversed(self.by_key.values())).after_bytes

    @property
    def least_after(self) -> dict[FrameKey, int]:
        """For each frame, what the step takes at least from its end on, if it holds nothing."""
        return self._least_of_all()[1]

    def _least_of_all(self) -> tuple[int, dict[FrameKey, int]]:
        """What the step takes at least, and from the end of each frame on.

        A captured inside may hold some bytes where a frame as in eager holds none, and takes much
        less time. So it counts, unless the smallest peak is much larger with it.
        """
        if self._least is None:
            planned, least = self._chained(only_schedules=True), self._chained()
            self._least = planned if planned[0] <= _PEAK_TOLERANCE * least[0] else least
        return self._least

    def _chained(self, *, only_schedules: bool = False) -> tuple[int, dict[FrameKey, int]]:
        after: dict[FrameKey, int] = {}
        least = 0
        for key, needs in reversed(self.by_key.items()):
            after[key] = max(needs.after_bytes, least)
            least = needs.least_before(after[key], only_schedules=only_schedules)
        return least, after

    @property
    def baseline_bytes(self) -> int:
        """The peak of a step that drops nothing."""
        held = peak = 0
        for needs in self.by_key.values():
            peak = max(peak, held + needs.forward_bytes, held + needs.backward_bytes)
            held += needs.saved_bytes
            peak = max(peak, held + needs.after_bytes)
        return peak

    def of(self, key: FrameKey) -> Needs:
        """Those of a frame; of one that was not recorded, the largest of its path, or of all."""
        known = self.by_key.get(key) or self._of_paths.get(key.path)
        if known is None:
            alike = [needs for each, needs in self.by_key.items() if each.path == key.path]
            known = self._of_paths[key.path] = _largest(alike or list(self.by_key.values()))
        return known

    def guessed_backward_bytes(self, key: FrameKey) -> int:
        """Of a frame whose backward was not measured: gradients of all that it saves."""
        needs = self.of(key)
        return max(needs.backward_bytes, needs.forward_bytes + needs.saved_bytes)

    def take(self, key: FrameKey, before: FrameKey | None, call_bytes: int) -> None:
        """Takes a call that was not recorded.

        What it takes for a second run is in memory from its forward to its backward, so all that
        follow need as much more.

        Args:
            key: the call.
            before: the call that it follows; None if it is the first.
            call_bytes: of that, its arguments among it.
        """
        self.by_key[key] = replace(self.of(key))
        self._new[key] = before, call_bytes
        self._taken.add(key)
        self.new_bytes += call_bytes
        self.has_new_calls = True

    def settle(self) -> None:
        """Has the calls that were taken since the last time take their places among the others."""
        if not self._new:
            return
        known = [key for key in self.by_key if key not in self._new]
        more_bytes = 0
        order = placed(known, {key: before for key, (before, _) in self._new.items()})
        self.by_key = {key: self.by_key[key] for key in order}
        for key, needs in self.by_key.items():
            more_bytes += self._new.get(key, (None, 0))[1]
            needs.add(more_bytes)
        self._new.clear()
        self._of_paths.clear()
        self.new_bytes, self._least = 0, None

    def add(self, num_bytes: int) -> None:
        """Counts what a step was seen to have live beside all that was known."""
        for needs in self.by_key.values():
            needs.add(num_bytes)
        self._of_paths.clear()
        self._least = None

    def set_schedules(
        self,
        number: int,
        schedules: Mapping[str, Sequence[ScheduleCost]],
        scale: float = 1.0,
    ) -> None:
        """Takes how calls run whose insides are captured.

        Args:
            number: of what follows; the same one stands for the same schedules.
            schedules: by the paths of calls; others have none.
            scale: size of the step that they belong to, relative to this one.
        """
        if number == self.schedules_number:
            return
        self.schedules_number, self._least = number, None
        self._of_paths.clear()
        scaled = {
            path: [schedule.scaled(1 / scale) for schedule in each]
            for path, each in schedules.items()
        }
        read_bytes = {
            path: max((schedule.read_output_bytes for schedule in each), default=0)
            for path, each in scaled.items()
        }
        for key, needs in self.by_key.items():
            needs.schedules = scaled.get(key.path, ())
            others = self.without_outputs.get(key, ())
            output_bytes = sum(read_bytes.get(each.path, 0) for each in others)
            needs.add(output_bytes - needs.output_bytes)
            needs.output_bytes = output_bytes

    def agree(self, agreement: Agreement) -> None:
        """Takes the largest needs of each call over all ranks. Collective."""
        for others in agreement.of_all(self.by_key):
            for key in self.by_key.keys() & others.keys():
                self.by_key[key] = _largest([self.by_key[key], others[key]])
        self._of_paths.clear()
        self.has_new_calls, self._least = False, None

    def learn(self, key: FrameKey, saved_bytes: int) -> None:
        """What a call saves, when it has run.

        It may save more than was measured, since it runs other ops: what it saves is live while its
        forward and backward run.
        """
        needs = self.by_key.get(key)
        if needs is None:
            return
        if key in self._taken:
            self._taken.remove(key)
            needs.saved_bytes = saved_bytes
        more_bytes = saved_bytes - needs.saved_bytes
        if more_bytes > 0:
            needs.saved_bytes += more_bytes
            needs.forward_bytes += more_bytes
            needs.backward_bytes += more_bytes
            self._least = None

    def learn_seconds(self, key: FrameKey, seconds: float) -> None:
        """The recompute time of a call."""
        needs = self.by_key.get(key)
        if needs is not None:
            needs.seconds = min(needs.seconds, seconds)


def merged(known: Sequence[FrameKey], present: Sequence[FrameKey]) -> list[FrameKey]:
    """The known calls, and new ones each after the call that went before it."""
    places = set(known)
    pairs = zip(present, [None, *present[:-1]][: len(present)], strict=True)
    return placed(known, {key: before for key, before in pairs if key not in places})


def placed(known: Sequence[FrameKey], new: Mapping[FrameKey, FrameKey | None]) -> list[FrameKey]:
    """Known calls, and new ones each after the one that it is given with."""
    following: defaultdict[FrameKey | None, list[FrameKey]] = defaultdict(list)
    for key, before in new.items():
        following[before].append(key)
    result: list[FrameKey] = []
    pending: list[FrameKey] = [*reversed(known), *following.pop(None, ())]
    while pending:
        key = pending.pop()
        result.append(key)
        pending += following.pop(key, ())
    return result


def _largest(several: Sequence[Needs]) -> Needs:
    return Needs(
        max((each.forward_bytes for each in several), default=0),
        max((each.after_bytes for each in several), default=0),
        max((each.backward_bytes for each in several), default=0),
        max((each.saved_bytes for each in several), default=0),
        max((each.seconds for each in several), default=0.0),
        max((each.before_forward_bytes for each in several), default=0),
        max((each.before_backward_bytes for each in several), default=0),
        max((each.output_bytes for each in several), default=0),
        next((each.schedules for each in several if each.schedules), ()),
    )
