"""Measures what a step needs, by the allocator, in stretches around its frames; and clocks."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate._torch.allocator import Recording, Stretch
from rockmate._torch.members import named_members
from rockmate._torch.storage import StorageWeakRef, bytes_of
from rockmate.frames.needs import MOST_PLANNED, FrameKey, Needs, StepNeeds
from rockmate.state.tensors import parts_of, tensors_in

_TICK_S = 1e-4
"""What a tick of the logical clock stands for."""


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds. On one thread of a CPU its own, which other work on the machine does not drive."""
    is_own = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_own else time.perf_counter


def logical_clock() -> Callable[[], float]:
    """A clock that goes on by a tick whenever it is read: at saved tensors and calls."""
    ticks = itertools.count()
    return lambda: next(ticks) * _TICK_S


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
        has_ended: whether a backward has run. A recording cannot be stopped within one, which
            restores the state of its thread.
        saved: bytes that a frame has saved, and seconds of its last run.
        peak_bytes: before the first frame; of the whole step where there is none; 0 if unknown.
    """

    def __init__(self, device: torch.device, model: nn.Module, *, is_look: bool = False) -> None:
        """Begins to record. Gradients of parameters that the step makes count for no need.

        A look at a step leaves the allocator's statistics, which are the script's, as they are.
        """
        self.has_ended, self.peak_bytes = False, 0
        gc.collect()  # memory of before that is freed meanwhile would count as room
        self._recording = Recording(device, leaves_out=is_look and device.type == "cuda")
        # A script may free gradients between forward and backward, and a forward the old data of
        # what it assigns. On a CPU, where the release of memory from before the recording is seen
        # only if another one saw it come, all of these are held until the recording ends.
        is_cpu = device.type == "cpu"
        members = named_members(model).values() if is_cpu else ()
        self._held = [part.untyped_storage() for each in members for part in parts_of(each)]
        parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._gradients = {each: each.grad for each in parameters if is_cpu or each.grad is None}
        self._with_gradient = set[torch.Tensor]()  # parameters of which a new one has come
        self._labels: list[_Label] = []  # of each stretch after the first
        self._outputs: dict[FrameKey, list[StorageWeakRef]] = {}
        self._without_outputs: defaultdict[FrameKey, set[FrameKey]] = defaultdict(set)
        self.saved: dict[FrameKey, tuple[int, float]] = {}
        # Data that an inference call has assigned has no node; `mark` sees that gradient.
        known = [each for each in self._gradients if not each.is_inference()]
        self._nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in known]
        # Nodes and their hooks live as long as the script's graph; a recording must not.
        recorder: weakref.ref[StepRecorder] = weakref.ref(self)
        self._handles = [
            node.register_hook(partial(_note_gradient, recorder, each))
            for node, each in zip(self._nodes, known, strict=True)
        ]

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Begins a new stretch of the same need where the first new gradient is in `.grad`."""
        num_bytes = self._new_bytes(parameter)
        if not num_bytes or parameter in self._with_gradient:
            return
        self._with_gradient.add(parameter)
        if self._labels:
            last = self._labels[-1]
            self._recording.mark()
            gradient_bytes = last.gradient_bytes + num_bytes
            self._labels.append(_Label(last.key, last.what, gradient_bytes, is_first=False))

    def _new_bytes(self, parameter: torch.Tensor) -> int:
        gradient = parameter.grad
        if gradient is None or gradient is self._gradients[parameter]:
            return 0
        return bytes_of(gradient)

    def note_seconds(self, key: FrameKey, seconds: float) -> None:
        """The recompute time of a frame, which is more than that of its forward."""
        if key in self.saved:
            self.saved[key] = self.saved[key][0], seconds

    def release(self) -> None:
        """Leaves no hook behind, and holds no gradient."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes, self._gradients, self._held = [], [], {}, []
        self._with_gradient.clear()

    def mark(self, key: FrameKey, what: str) -> None:
        """Begins the stretch of one of a frame's needs; of none if `what` is empty."""
        gradient_bytes = sum(map(self._new_bytes, self._gradients))
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
        if len(self._outputs) > MOST_PLANNED:
            return
        for other, references in self._outputs.items():
            if any(each.expired() for each in references):
                self._without_outputs[key].add(other)
            if other == key:
                break

    def end(self) -> None:
        """A backward has run. What is allocated until a frame's next one does not count."""
        self.has_ended = True
        self.pause()

    def pause(self) -> None:
        """What runs until the next frame does not count: a call without gradients, say."""
        if self._labels:
            self.mark(self._labels[-1].key, "")

    @property
    def can_stop(self) -> bool:
        """Whether this thread can: only the one in which it began."""
        return self._recording.can_stop

    @property
    def has_frames(self) -> bool:
        """Whether any frame has run."""
        return bool(self._labels)

    def is_whole(self) -> bool:
        """Whether each frame has begun its backward that has saved something for it."""
        return not any(self.saved.get(key, (1, 0.0))[0] for key in self._without_backward())

    def _without_backward(self) -> frozenset[FrameKey]:
        begun = {each.key for each in self._labels if each.what == "backward_bytes"}
        return frozenset(each.key for each in self._labels if each.key not in begun)

    def stop(self, num_elements: int) -> StepNeeds:
        """The needs; what `mark` has not seen is left out."""
        self.release()
        first, *stretches = self._recording.stop() or [Stretch(0, 0)]
        self.peak_bytes = first.peak_bytes if self._recording.is_known else 0
        without = self._without_backward()
        step = StepNeeds(
            num_elements=num_elements,
            without_backward=without,
            without_outputs=self._without_outputs,
        )
        own, present = {each.key for each in self._labels if each.what == "forward_bytes"}, None
        for label, stretch in zip(self._labels, stretches, strict=False):
            key, what, gradient_bytes, is_first = label
            # A backward of a forward before, with other frames, is no call of this step.
            key = present = key if key in own or present is None else present
            needs = step.by_key.setdefault(key, Needs())
            if not what:
                continue
            for each in (what, "backward_bytes") if what == "between_bytes" else (what,):
                peak = max(getattr(needs, each), stretch.peak_bytes - gradient_bytes)
                setattr(needs, each, peak)
            before = f"before_{what}"
            if is_first and hasattr(needs, before):
                begin = max(getattr(needs, before), stretch.begin_bytes - gradient_bytes)
                setattr(needs, before, begin)
        # A process's first calls are slow: medians are of calls that save and take as much.
        alike: defaultdict[Hashable, list[float]] = defaultdict(list)
        for key, (saved_bytes, seconds) in self.saved.items():
            needs = step.by_key.setdefault(key, Needs())
            needs.saved_bytes = saved_bytes
            alike[saved_bytes, needs.forward_bytes - needs.before_forward_bytes].append(seconds)
        for needs in step.by_key.values():
            times = alike[needs.saved_bytes, needs.forward_bytes - needs.before_forward_bytes]
            needs.seconds = median(times) if times else 0.0
        return step


@dataclass(slots=True)
class Measuring:
    """What is measured of a step.

    Attributes:
        on_end: gives what takes what was recorded; None if nobody is left who asks.
        recorder: of the step; None if nothing is recorded.
        is_on: whether the step holds nothing and is measured.
        is_unmeasured: whether steps of its size were without a backward when they were measured.
        has_new_backward: whether one ran that the measured step did not have.
    """

    on_end: Callable[[], Callable[[], None] | None]
    recorder: StepRecorder | None = None
    is_on: bool = False
    is_unmeasured: bool = False
    has_new_backward: bool = False

    def end_if_whole(self) -> None:
        """After a backward, if it was that of all frames: another one may be to come."""
        if self.recorder is not None and self.recorder.is_whole():
            self.end()

    def end(self) -> None:
        """The step has ended, as far as is known."""
        (self.on_end() or self.leave)()

    def leave(self) -> None:
        """The step is not measured after all."""
        if self.recorder is not None:
            self.recorder.stop(1)
        self.recorder, self.is_on = None, False


def _note_gradient(recorder: weakref.ref[StepRecorder], parameter: torch.Tensor, *_: Any) -> None:
    if (present := recorder()) is not None:
        present.note_gradient(parameter)
