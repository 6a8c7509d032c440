"""What frames hold, what a step needs beside it, and which frame is dropped.

The live bytes of a step are those that frames hold, which can be dropped, and the rest: inputs of
frames, what is saved between them, results of ops. The rest is measured in a step that holds
nothing. In later steps a frame is dropped before the sum of both would pass the budget.

Dropped is the frame with the least seconds / (bytes x distance to its backward). Backwards run in
the reverse order of forwards, so the distance is known. A frame that was made again stays until
its last read, so each forward runs at most twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from rockmate._torch.allocator import Recording, Stretch
from rockmate._torch.engine import at_end_of_backward
from rockmate._torch.storage import storage_id


class FrameKey(NamedTuple):
    """Which call of which submodule a frame is, within one call of the model."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path} (call {self.number + 1})"


class Frame(Protocol):
    """What a frame tells of itself; see `rockmate.frames.frame.Frame`."""

    key: FrameKey
    order: int
    num_bytes: int
    seconds: float

    @property
    def is_dropped(self) -> bool: ...  # noqa: D102
    @property
    def can_drop(self) -> bool: ...  # noqa: D102
    def drop(self) -> None: ...  # noqa: D102


@dataclass(slots=True)
class Needs:
    """Peaks around one frame in a step that holds nothing, in bytes.

    Attributes:
        forward_bytes: while its forward runs.
        after_bytes: from there to the next frame, or to the first backward.
        backward_bytes: while it is made again and its backward runs, up to the next one's.
        saved_bytes: what it saves.
        seconds: that its forward takes.
    """

    forward_bytes: int = 0
    after_bytes: int = 0
    backward_bytes: int = 0
    saved_bytes: int = 0
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The largest of the peaks."""
        return max(self.forward_bytes, self.after_bytes, self.backward_bytes)


@dataclass(slots=True)
class StepNeeds:
    """The needs of the frames of a recorded step, in the order of their forwards."""

    by_key: dict[FrameKey, Needs] = field(default_factory=dict)
    num_elements: int = 0
    _of_others: dict[FrameKey, Needs] = field(default_factory=dict)

    @property
    def minimum_bytes(self) -> int:
        """The peak of a step that holds nothing."""
        return max((needs.peak_bytes for needs in self.by_key.values()), default=0)

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


def _largest(several: Sequence[Needs]) -> Needs:
    return Needs(
        max((each.forward_bytes for each in several), default=0),
        max((each.after_bytes for each in several), default=0),
        max((each.backward_bytes for each in several), default=0),
        max((each.saved_bytes for each in several), default=0),
        max((each.seconds for each in several), default=0.0),
    )


@dataclass(slots=True)
class Counts:
    """What happened to frames.

    Attributes:
        num_frames: calls that were frames.
        num_dropped: how many of them were dropped.
        num_made_again: how many of those ran again.
        made_again_s: seconds of these runs.
    """

    num_frames: int = 0
    num_dropped: int = 0
    num_made_again: int = 0
    made_again_s: float = 0.0


class StepRecorder:
    """Measures the needs of a step that holds nothing.

    Attributes:
        has_ended: whether the backward of the step has run. What is allocated from then on does not
            count, until `stop`: a recording cannot be stopped within a backward, which restores
            the state of its thread.
        saved: bytes that a frame has saved, and seconds of its forward.
    """

    def __init__(self, device: torch.device, parameters: Sequence[torch.Tensor]) -> None:
        """Begins to record.

        Args:
            device: of the model.
            parameters: whose gradients, if the step makes them, count for no need.
        """
        self.has_ended = False
        self._recording = Recording(device)
        self._without_gradient = [each for each in parameters if each.grad is None]
        # For each stretch after the first: its frame, which of its needs, and gradients so far.
        self._labels: list[tuple[FrameKey, str, int]] = []
        self.saved: dict[FrameKey, tuple[int, float]] = {}

    def mark(self, key: FrameKey, what: str) -> None:
        """Begins the stretch of one of a frame's needs."""
        gradient_bytes = sum(
            each.grad.nbytes for each in self._without_gradient if each.grad is not None
        )
        self._recording.mark()
        self._labels.append((key, what, gradient_bytes))

    def end(self) -> None:
        """The backward has run."""
        self._recording.mark()
        self.has_ended = True

    def stop(self, num_elements: int) -> StepNeeds:
        """The needs; what `mark` has not seen is left out."""
        stretches: list[Stretch] = self._recording.stop()[1:]
        step = StepNeeds(num_elements=num_elements)
        for (key, what, gradient_bytes), stretch in zip(self._labels, stretches, strict=False):
            needs = step.by_key.setdefault(key, Needs())
            peak = max(getattr(needs, what), stretch.peak_bytes - gradient_bytes)
            setattr(needs, what, peak)
        for key, (saved_bytes, seconds) in self.saved.items():
            needs = step.by_key.setdefault(key, Needs())
            needs.saved_bytes, needs.seconds = saved_bytes, seconds
        return step


class Memory:
    """What the frames of one model hold, and the budget for it.

    Attributes:
        device: of the model.
        budget_bytes: None while nothing is to be held.
        needs: of a recorded step; None before the first.
        scale: size of the present call relative to the recorded one.
        changing_buffers: for each path, the buffers that its forward changes.
        counts: since the last reset.
        held_bytes: of storages that frames hold.
        peak_bytes: the largest predicted sum of held and needed bytes since the last reset.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.budget_bytes: int | None = None
        self.needs: StepNeeds | None = None
        self.recorder: StepRecorder | None = None
        self.scale = 1.0
        self.changing_buffers: dict[str, set[tuple[int, str]]] = {}
        self.counts = Counts()
        self.held_bytes = self.peak_bytes = 0
        self.is_inside = False
        self._holders: dict[int, list[int]] = {}  # storage -> number of holders, bytes
        self._frames: dict[int, weakref.ref[Frame]] = {}
        self._backward_of: weakref.ref[Frame] | None = None

    def begin_step(self) -> None:
        """Forgets what happened in earlier steps; frames of theirs stay."""
        self.counts, self.peak_bytes, self._backward_of = Counts(), 0, None

    # --- storages ---------------------------------------------------------------------------------

    def hold(self, tensor: torch.Tensor) -> int:
        """Counts one more holder of a tensor's storages; bytes that were not held before."""
        added = 0
        for part in parts_of(tensor):
            entry = self._holders.setdefault(storage_id(part), [0, part.untyped_storage().nbytes()])
            added += 0 if entry[0] else entry[1]
            entry[0] += 1
        self.held_bytes += added
        return added

    def let_go(self, tensor: torch.Tensor) -> int:
        """Counts one holder less; bytes that are not held any more."""
        held_bytes = self.held_bytes
        for part in parts_of(tensor):
            key = storage_id(part)
            entry = self._holders[key]
            entry[0] -= 1
            if not entry[0]:
                self.held_bytes -= entry[1]
                del self._holders[key]
        return held_bytes - self.held_bytes

    # --- frames -----------------------------------------------------------------------------------

    @contextmanager
    def inside_frame(self) -> Iterator[None]:
        """Calls within are part of a frame."""
        was_inside, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = was_inside

    def begin_forward(self, frame: Frame) -> None:
        """Makes room for a frame's forward."""
        if self.recorder is not None:
            self.recorder.mark(frame.key, "forward_bytes")
        elif self.needs is not None:
            self._make_room(self.needs.of(frame.key).forward_bytes, position=frame.order)

    def end_forward(self, frame: Frame) -> None:
        """Takes a frame whose forward has run, and makes room for what follows."""
        self.counts.num_frames += 1
        self._frames[frame.order] = weakref.ref(frame)
        if self.recorder is not None:
            self.recorder.saved[frame.key] = frame.num_bytes, frame.seconds
        if self.budget_bytes is None:
            self._drop(frame)
        elif self.needs is not None:
            self._make_room(self.needs.of(frame.key).after_bytes, position=frame.order + 1)
        if self.recorder is not None:
            self.recorder.mark(frame.key, "after_bytes")

    def begin_backward(self, frame: Frame) -> None:
        """Makes room for a frame's backward, when it begins."""
        present = self._backward_of
        if present is not None and present() is frame:
            return
        self._backward_of = weakref.ref(frame)
        if self.recorder is not None:
            if present is None:
                at_end_of_backward(self.recorder.end)
            self.recorder.mark(frame.key, "backward_bytes")
        elif self.needs is not None:
            needed = self.needs.of(frame.key).backward_bytes
            held = 0 if frame.is_dropped else frame.num_bytes
            scaled = needed - held / max(self.scale, 1e-9)
            self._make_room(int(scaled), position=frame.order, but=frame)

    def note_made_again(self, seconds: float) -> None:
        """Counts a second run of a forward."""
        self.counts.num_made_again += 1
        self.counts.made_again_s += seconds

    def drop_one(self, position: int, but: Frame | None = None) -> bool:
        """Drops the frame that costs the least; whether there was one."""
        frames = [(order, reference()) for order, reference in self._frames.items()]
        self._frames = {order: weakref.ref(each) for order, each in frames if each is not None}
        live = [each for _, each in frames if each is not None and each is not but]
        able = [each for each in live if each.can_drop]
        if not able:
            return False
        self._drop(min(able, key=lambda each: _price(each, position)))
        return True

    def _make_room(self, needed_bytes: int, *, position: int, but: Frame | None = None) -> None:
        assert self.budget_bytes is not None
        needed = int(needed_bytes * self.scale)
        while self.held_bytes + needed > self.budget_bytes:
            if not self.drop_one(position, but):
                break
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + needed)

    def _drop(self, frame: Frame) -> None:
        if frame.can_drop:
            frame.drop()
            self.counts.num_dropped += 1


def _price(frame: Frame, position: int) -> float:
    """Seconds for each byte, and for each frame that lies between now and its backward."""
    return frame.seconds / (frame.num_bytes * max(1, position - frame.order))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, if it is no wrapper."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def storages_of(tensor: torch.Tensor) -> list[int]:
    """Keys of the storages of a tensor, or of the tensors that it is made of."""
    return [storage_id(part) for part in parts_of(tensor)]
