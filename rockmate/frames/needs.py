"""What a step needs beside what frames hold: measured in a step that holds nothing."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from rockmate._torch.allocator import Recording, Stretch
from rockmate._torch.storage import StorageWeakRef, bytes_of
from rockmate.frames.agreement import Agreement
from rockmate.frames.way import Way
from rockmate.state.tensors import parts_of, tensors_in

_MUCH = 1.01
"""A peak that is so much larger than the smallest is not taken for it."""


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
        backward_bytes: while it is made again and its backward runs, up to the next one's.
        saved_bytes: what it saves.
        seconds: that its forward takes.
        before_forward_bytes: live when its forward begins.
        before_backward_bytes: live when its backward begins.
        output_bytes: of all these, of outputs that captured insides read again.
        ways: how it runs if its inside is captured.
    """

    forward_bytes: int = 0
    after_bytes: int = 0
    backward_bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0
    before_forward_bytes: int = 0
    before_backward_bytes: int = 0
    output_bytes: int = 0
    ways: Sequence[Way] = ()

    @property
    def peak_bytes(self) -> int:
        """The largest of the peaks."""
        return max(self.forward_bytes, self.after_bytes, self.backward_bytes)

    def peak_of(self, way: Way) -> int:
        """The largest peak of its forward and backward, if it runs in a way."""
        return max(
            self.before_forward_bytes + way.forward_bytes,
            self.before_backward_bytes + way.backward_bytes,
        )

    def add(self, num_bytes: int) -> None:
        """Counts what is in memory beside all that was measured."""
        self.forward_bytes += num_bytes
        self.after_bytes += num_bytes
        self.backward_bytes += num_bytes
        self.before_forward_bytes += num_bytes
        self.before_backward_bytes += num_bytes

    def least_before(self, after_bytes: int, *, only_ways: bool = False) -> int:
        """Bytes without which neither it nor what follows can run.

        Args:
            after_bytes: that what follows takes at least.
            only_ways: whether it runs in one of its ways, if there are any.
        """
        found = [max(self.peak_of(way), way.held_bytes + after_bytes) for way in self.ways]
        if not (found and only_ways):
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
        ways_number: which ways the calls have; 0 for none.
        has_new_calls: whether calls have been added that ranks have not agreed on.
        without_backward: calls whose backward did not run in the step.
        without_outputs: for a call, itself and others before it, if their outputs were free when it
            ran. They are not where a backward of a captured inside is to read them.
    """

    by_key: dict[FrameKey, Needs] = field(default_factory=dict)
    num_elements: int = 0
    ways_number: int = 0
    has_new_calls: bool = False
    without_backward: frozenset[FrameKey] = frozenset()
    without_outputs: Mapping[FrameKey, Set[FrameKey]] = field(default_factory=dict)
    _of_others: dict[FrameKey, Needs] = field(default_factory=dict)
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
    def least_after(self) -> dict[FrameKey, int]:
        """For each frame, what the step takes at least from its end on, if it holds nothing."""
        return self._least_of_all()[1]

    def _least_of_all(self) -> tuple[int, dict[FrameKey, int]]:
        """What the step takes at least, and from the end of each frame on.

        A captured inside may hold some bytes where a frame as in eager holds none, and takes much
        less time. So it counts, unless the smallest peak is much larger with it.
        """
        if self._least is None:
            planned, least = self._chained(only_ways=True), self._chained()
            self._least = planned if planned[0] <= _MUCH * least[0] else least
        return self._least

    def _chained(self, *, only_ways: bool = False) -> tuple[int, dict[FrameKey, int]]:
        after: dict[FrameKey, int] = {}
        least = 0
        for key, needs in reversed(self.by_key.items()):
            after[key] = max(needs.after_bytes, least)
            least = needs.least_before(after[key], only_ways=only_ways)
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
        known = self.by_key.get(key) or self._of_others.get(key)
        if known is None:
            alike = [needs for each, needs in self.by_key.items() if each.path == key.path]
            known = self._of_others[key] = _largest(alike or list(self.by_key.values()))
        return known

    def guessed_backward_bytes(self, key: FrameKey) -> int:
        """Of a frame whose backward was not measured: gradients of all that it saves."""
        needs = self.of(key)
        return max(needs.backward_bytes, needs.forward_bytes + needs.saved_bytes)

    def take(self, key: FrameKey, before: FrameKey | None, call_bytes: int) -> None:
        """Has a call that was not recorded take its place.

        What it takes for a second run is in memory from its forward to its backward, so all that
        follow need as much more.

        Args:
            key: the call.
            before: the call that it follows; None if it is the first.
            call_bytes: of that, its arguments among it.
        """
        order = merged(list(self.by_key), [key] if before is None else [before, key])
        following = order[order.index(key) :]
        self.by_key[key] = replace(self.of(key))
        self.by_key = {each: self.by_key[each] for each in order}
        for each in following:
            self.by_key[each].add(call_bytes)
        self._taken.add(key)
        self.has_new_calls, self._least = True, None

    def take_ways(
        self,
        number: int,
        ways: Mapping[str, Sequence[Way]],
        scale: float = 1.0,
    ) -> None:
        """Takes how calls run whose insides are captured.

        Args:
            number: of what follows; the same one stands for the same ways.
            ways: by the paths of calls; others have none.
            scale: size of the step that they belong to, relative to this one.
        """
        if number == self.ways_number:
            return
        self.ways_number, self._least = number, None
        self._of_others.clear()
        scaled = {path: [way.scaled(1 / scale) for way in each] for path, each in ways.items()}
        read_bytes = {
            path: max((way.read_output_bytes for way in each), default=0)
            for path, each in scaled.items()
        }
        for key, needs in self.by_key.items():
            needs.ways = scaled.get(key.path, ())
            others = self.without_outputs.get(key, ())
            output_bytes = sum(read_bytes.get(each.path, 0) for each in others)
            needs.add(output_bytes - needs.output_bytes)
            needs.output_bytes = output_bytes

    def agree(self, agreement: Agreement) -> None:
        """Takes the largest needs of each call over all ranks. Collective."""
        for others in agreement.of_all(self.by_key):
            for key in self.by_key.keys() & others.keys():
                self.by_key[key] = _largest([self.by_key[key], others[key]])
        self._of_others.clear()
        self.has_new_calls, self._least = False, None

    def learn(self, key: FrameKey, saved_bytes: int, seconds: float) -> None:
        """What a call that was not recorded saves, and how long it takes, when it has run."""
        if key in self._taken:
            self._taken.remove(key)
            self.by_key[key] = replace(self.by_key[key], saved_bytes=saved_bytes, seconds=seconds)


def merged(known: list[FrameKey], present: Iterable[FrameKey]) -> list[FrameKey]:
    """The known calls, and new ones each after the call that went before it."""
    result, places = list(known), set(known)
    before: FrameKey | None = None
    for key in present:
        if key not in places:
            result.insert(0 if before is None else result.index(before) + 1, key)
            places.add(key)
        before = key
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
        next((each.ways for each in several if each.ways), ()),
    )


class _Label(NamedTuple):
    """What a stretch of a recording is.

    Attributes:
        key: its frame.
        what: which of the frame's needs; empty for none.
        gradient_bytes: of new gradients when it begins.
        is_first: whether it does not follow another one of the same need.
    """

    key: FrameKey
    what: str
    gradient_bytes: int
    is_first: bool = True


class StepRecorder:
    """Measures the needs of a step that holds nothing.

    A gradient that the step makes counts until it is in `.grad`. There it is in later steps from
    the start, or its parameter has none in them; either way it is no need of a frame.

    Attributes:
        has_ended: whether the backward of the step has run. What is allocated from then on does not
            count, until `stop`: a recording cannot be stopped within a backward, which restores
            the state of its thread.
        saved: bytes that a frame has saved, and seconds of its forward.
        peak_bytes: before the first frame; of the whole step where there is none.
    """

    def __init__(self, device: torch.device, parameters: Sequence[torch.Tensor]) -> None:
        """Begins to record.

        Args:
            device: of the model.
            parameters: whose gradients, if the step makes them, count for no need.
        """
        self.has_ended, self.peak_bytes = False, 0
        gc.collect()  # memory of before that is freed meanwhile would count as room
        self._recording = Recording(device)
        self._without_gradient = [each for each in parameters if each.grad is None]
        self._labels: list[_Label] = []  # of each stretch after the first
        self._outputs: dict[FrameKey, list[StorageWeakRef]] = {}
        self._without_outputs: defaultdict[FrameKey, set[FrameKey]] = defaultdict(set)
        self.saved: dict[FrameKey, tuple[int, float]] = {}
        self._nodes = [
            torch.autograd.graph.get_gradient_edge(each).node for each in self._without_gradient
        ]
        # Nodes and their hooks live as long as the script's graph; a recording must not.
        recorder: weakref.ref[StepRecorder] = weakref.ref(self)
        self._handles = [
            node.register_hook(_noting_first(each, recorder))
            for node, each in zip(self._nodes, self._without_gradient, strict=True)
        ]

    def note_gradient(self, num_bytes: int) -> None:
        """A new gradient is in `.grad`: begins a new stretch of the same need."""
        if self._labels and not self.has_ended:
            last = self._labels[-1]
            self._recording.mark()
            gradient_bytes = last.gradient_bytes + num_bytes
            self._labels.append(_Label(last.key, last.what, gradient_bytes, is_first=False))

    def release(self) -> None:
        """Leaves no hook behind."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def mark(self, key: FrameKey, what: str) -> None:
        """Begins the stretch of one of a frame's needs; of none if `what` is empty."""
        gradient_bytes = sum(
            bytes_of(each.grad) for each in self._without_gradient if each.grad is not None
        )
        self._recording.mark()
        self._labels.append(_Label(key, what, gradient_bytes))
        if what:
            self._note_free_outputs(key)

    def note_output(self, key: FrameKey, output: Any) -> None:
        """What a frame has returned. Others may take it, or nobody."""
        tensors = [part for each in tensors_in(output) for part in parts_of(each)]
        self._outputs[key] = [StorageWeakRef(each.untyped_storage()) for each in tensors]

    def _note_free_outputs(self, key: FrameKey) -> None:
        """Notes which outputs are free, of a frame and those before it."""
        for other, references in self._outputs.items():
            if any(each.expired() for each in references):
                self._without_outputs[key].add(other)
            if other == key:
                break

    def end(self) -> None:
        """The backward has run."""
        self._recording.mark()
        self.has_ended = True

    @property
    def can_stop(self) -> bool:
        """Whether this thread can: only the one in which it began."""
        return self._recording.can_stop

    @property
    def has_frames(self) -> bool:
        """Whether any frame has run."""
        return bool(self._labels)

    def is_whole(self) -> bool:
        """Whether each frame has begun its backward."""
        return not self._without_backward()

    def _without_backward(self) -> frozenset[FrameKey]:
        begun = {each.key for each in self._labels if each.what == "backward_bytes"}
        return frozenset(each.key for each in self._labels if each.key not in begun)

    def stop(self, num_elements: int) -> StepNeeds:
        """The needs; what `mark` has not seen is left out."""
        self.release()
        first, *stretches = self._recording.stop() or [Stretch(0, 0)]
        self.peak_bytes = first.peak_bytes
        without = self._without_backward()
        step = StepNeeds(
            num_elements=num_elements,
            without_backward=without,
            without_outputs=self._without_outputs,
        )
        for label, stretch in zip(self._labels, stretches, strict=False):
            key, what, gradient_bytes, is_first = label
            needs = step.by_key.setdefault(key, Needs())
            if not what:
                continue
            peak = max(getattr(needs, what), stretch.peak_bytes - gradient_bytes)
            setattr(needs, what, peak)
            before = f"before_{what}"
            if is_first and what != "after_bytes":
                begin = max(getattr(needs, before), stretch.begin_bytes - gradient_bytes)
                setattr(needs, before, begin)
        for key, (saved_bytes, seconds) in self.saved.items():
            needs = step.by_key.setdefault(key, Needs())
            needs.saved_bytes, needs.seconds = saved_bytes, seconds
        return step


def _noting_first(
    parameter: torch.Tensor, recorder: weakref.ref[StepRecorder]
) -> Callable[..., None]:
    """A hook that notes the first gradient of a parameter."""
    is_new = True

    def note(*_: Any) -> None:
        nonlocal is_new
        present, gradient = recorder(), parameter.grad
        if is_new and present is not None and gradient is not None:
            is_new = False
            present.note_gradient(bytes_of(gradient))

    return note
