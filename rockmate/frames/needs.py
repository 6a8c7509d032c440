"""What a step needs beside what frames hold: measured in a step that holds nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from rockmate.frames.agreement import Agreement

_PEAK_TOLERANCE = 1.01
"""A peak that is so much larger than the smallest is not taken for it."""
MOST_PLANNED = 256
"""Frames of a step of which insides are captured: what is known of each pair of them counts."""
_BYTES = (
    "forward_bytes", "after_bytes", "backward_bytes", "between_bytes", "before_forward_bytes",
    "before_backward_bytes",
)  # fmt: skip


class FrameKey(NamedTuple):
    """Which call of which submodule a frame is, within one call of the model."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path} (call {self.number + 1})"


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """What one schedule of a captured frame takes. Bytes are beside what was live before.

    Attributes:
        held_bytes: from its forward to its backward, without its outputs.
        read_output_bytes: of outputs that its backward reads.
        forward_bytes: peak of its forward.
        backward_bytes: peak of its backward, with what it holds, without its outputs and their
            gradients.
        added_bytes: of the end of its backward, while autograd adds a gradient of a parameter to
            another.
        output_gradient_bytes: of gradients of its outputs.
        recompute_s: recompute time.
        seconds: time of forward and backward beyond that of eager.
    """

    held_bytes: int
    read_output_bytes: int
    forward_bytes: int
    backward_bytes: int
    added_bytes: int
    output_gradient_bytes: int
    recompute_s: float
    seconds: float

    def within(self, *, copies: bool, adds: bool) -> ScheduleCost:
        """What it takes where gradients of outputs are copied, or those of parameters are added."""
        backward_bytes = max(self.backward_bytes, self.added_bytes if adds else 0)
        backward_bytes += self.output_gradient_bytes if copies else 0
        return replace(self, backward_bytes=backward_bytes)

    def scaled(self, factor: float) -> ScheduleCost:
        """That of a step so many times as large."""
        if factor == 1:
            return self
        names = [each.name for each in fields(self) if each.name.endswith("_bytes")]
        sizes = {name: math.ceil(factor * getattr(self, name)) for name in names}
        return replace(
            self, recompute_s=factor * self.recompute_s, seconds=factor * self.seconds, **sizes
        )


class Option(NamedTuple):
    """How a frame may run: it drops nothing, or all that it saves, or it runs a schedule.

    Attributes:
        held_bytes: from its forward to its backward.
        peak_bytes: of its forward and backward, with what is live beside them.
        seconds: beyond eager's.
        schedule: its number; None if the frame runs as in eager.
        is_kept: whether it drops nothing.
    """

    held_bytes: int
    peak_bytes: int
    seconds: float
    schedule: int | None = None
    is_kept: bool = False


@dataclass(slots=True)
class Needs:
    """Peaks around one frame in a step that holds nothing, in bytes.

    Attributes:
        forward_bytes: while its forward runs.
        after_bytes: from there to the next frame, or to the first backward.
        backward_bytes: while it is recomputed and its backward runs, up to the next one's.
        between_bytes: of that, from its end on.
        saved_bytes: what it saves.
        seconds: recompute time.
        before_forward_bytes: live when its forward begins.
        before_backward_bytes: live when its backward begins.
        output_bytes: of all these, of outputs that captured insides read again.
        taken_bytes: of all these, of calls before it that were not recorded.
        schedules: of its captured inside, if it has one.
    """

    forward_bytes: int = 0
    after_bytes: int = 0
    backward_bytes: int = 0
    between_bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0
    before_forward_bytes: int = 0
    before_backward_bytes: int = 0
    output_bytes: int = 0
    taken_bytes: int = 0
    schedules: Sequence[ScheduleCost] = ()

    @property
    def peak_bytes(self) -> int:
        """The largest of the peaks."""
        return max(self.forward_bytes, self.after_bytes, self.backward_bytes)

    def forward_peak(self, schedule: ScheduleCost | None, scale: float = 1.0) -> int:
        """Peak of its forward, as in eager (None) or by a schedule.

        Args:
            schedule: which.
            scale: size of the step relative to the measured one; the schedule has the step's size.
        """
        if schedule is None:
            return int(scale * self.forward_bytes)
        return int(scale * self.before_forward_bytes) + schedule.forward_bytes

    def backward_peak(self, schedule: ScheduleCost | None, scale: float = 1.0) -> int:
        """Peak of its backward, up to the next one's; arguments as for `forward_peak`."""
        if schedule is None:
            return int(scale * self.backward_bytes)
        own_bytes = int(scale * self.before_backward_bytes) + schedule.backward_bytes
        return max(own_bytes, int(scale * self.between_bytes))

    def _option(self, number: int | None, held_bytes: int, seconds: float) -> Option:
        schedule = None if number is None else self.schedules[number]
        peak_bytes = max(self.forward_peak(schedule), self.backward_peak(schedule))
        return Option(held_bytes, peak_bytes, seconds, number)

    @property
    def options(self) -> list[Option]:
        """How it may run: it drops nothing, or all, or runs one of its schedules."""
        own = [self._option(None, self.saved_bytes, 0.0)._replace(is_kept=True)]
        own += [self._option(None, 0, self.seconds)] if self.saved_bytes else []
        schedules = enumerate(self.schedules)
        return own + [self._option(at, each.held_bytes, each.seconds) for at, each in schedules]

    def add(self, num_bytes: int) -> None:
        """Counts what is in memory beside all that was measured."""
        for name in _BYTES:
            setattr(self, name, getattr(self, name) + num_bytes)

    def least_before(self, after_bytes: int, *, only_schedules: bool = False) -> int:
        """Bytes without which neither it nor what follows can run.

        Args:
            after_bytes: that what follows takes at least.
            only_schedules: whether it runs by one of its schedules, if there are any.
        """
        found = [
            max(each.peak_bytes, each.held_bytes + after_bytes)
            for each in self.options
            if each.schedule is not None
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
        without_backward: calls whose backward did not run in the step.
        without_outputs: for a call, itself and others before it, if their outputs were free when it
            ran. They are not where a backward of a captured inside is to read them.
    """

    by_key: dict[FrameKey, Needs] = field(default_factory=dict)
    num_elements: int = 0
    schedules_number: int = 0
    has_new_calls: bool = False
    without_backward: frozenset[FrameKey] = frozenset()
    without_outputs: Mapping[FrameKey, Set[FrameKey]] = field(default_factory=dict)
    _taken: set[FrameKey] = field(default_factory=set)
    _least: tuple[int, dict[FrameKey, int]] | None = None
    _added_bytes: int = 0

    @property
    def minimum_bytes(self) -> int:
        """The smallest peak: of a step that holds nothing but what captured insides have to."""
        return self._least_of_all()[0]

    @property
    def last_bytes(self) -> int:
        """Live behind the last frame, of what was measured."""
        last = next(reversed(self.by_key.values())) if self.by_key else Needs()
        return last.after_bytes - self._added_bytes

    @property
    def outside_bytes(self) -> int:
        """The peak without all that frames themselves take."""
        return max(
            max(needs.before_forward_bytes, needs.before_backward_bytes, needs.after_bytes)
            for needs in self.by_key.values()
        )

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
        if (known := self.by_key.get(key)) is not None:
            return known
        alike = [needs for each, needs in self.by_key.items() if each.path == key.path]
        recorded = [replace(each, taken_bytes=0) for each in alike or self.by_key.values()]
        for each, known in zip(recorded, alike or self.by_key.values(), strict=True):
            each.add(-known.taken_bytes)
        return _largest(recorded)

    def take(self, key: FrameKey, before: FrameKey | None, call_bytes: int) -> None:
        """Takes a call that was not recorded into its place among the others.

        What it takes for a second run is in memory from its forward to its backward, so all that
        follow need as much more.

        Args:
            key: the call.
            before: the call that it follows; None if it is the first.
            call_bytes: of that, its arguments among it.
        """
        own = replace(self.of(key))
        own.add(self.by_key[before].taken_bytes if before is not None else 0)
        own.taken_bytes = 0 if before is None else self.by_key[before].taken_bytes
        place = 0 if before is None else list(self.by_key).index(before) + 1
        items = list(self.by_key.items())
        for _, needs in (*items[place:], (key, own)):
            needs.add(call_bytes)
            needs.taken_bytes += call_bytes
        self.by_key = dict([*items[:place], (key, own), *items[place:]])
        self._taken.add(key)
        self.has_new_calls, self._least = True, None

    def peak_from(self, key: FrameKey, schedule: ScheduleCost | None, scale: float) -> float:
        """Peak of the step from a frame on that runs a schedule, or holds nothing as in eager.

        What follows holds nothing. Arguments are those of `Needs.forward_peak`.
        """
        needs, after_bytes = self.of(key), self._least_of_all()[1].get(key, self.minimum_bytes)
        return max(
            needs.forward_peak(schedule, scale),
            needs.backward_peak(schedule, scale),
            scale * after_bytes + (0 if schedule is None else schedule.held_bytes),
        )

    def add(self, num_bytes: int) -> None:
        """Counts what a step was seen to have live beside all that was known."""
        for needs in self.by_key.values():
            needs.add(num_bytes)
        self._added_bytes += num_bytes
        self._least = None

    def set_schedules(
        self, number: int, schedules: Mapping[str, Sequence[ScheduleCost]], scale: float = 1.0
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
        if key in self.by_key:
            self.by_key[key].seconds = min(self.by_key[key].seconds, seconds)


def _largest(several: Sequence[Needs]) -> Needs:
    names = (*_BYTES, "saved_bytes", "seconds", "output_bytes")
    found = {name: max([getattr(each, name) for each in several], default=0) for name in names}
    schedules = next((each.schedules for each in several if each.schedules), ())
    return Needs(**found, schedules=schedules)
