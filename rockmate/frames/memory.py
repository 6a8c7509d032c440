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
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from rockmate._torch.allocator import Recording, Stretch
from rockmate._torch.engine import at_end_of_backward
from rockmate._torch.storage import storage_id
from rockmate.frames.menu import FrameProfile, Offer, menu, smoothed

_REMEMBERED_STEPS = 4
_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
    offers: tuple[Offer, ...]

    @property
    def present(self) -> Offer | None: ...  # noqa: D102
    @property
    def next_offer(self) -> Offer | None: ...  # noqa: D102
    def drop_next(self) -> None: ...  # noqa: D102
    def drop_all(self) -> None: ...  # noqa: D102
    def everything(self) -> Offer: ...  # noqa: D102
    def profile(self) -> FrameProfile: ...  # noqa: D102


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
        is_profiling: whether menus are made from the frames of this step.
        menus: what each frame may give up.
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
        self.is_profiling = False
        self.menus: dict[FrameKey, tuple[Offer, ...]] = {}
        self._profiles: dict[FrameKey, FrameProfile] = {}
        self._menu_of_path: dict[str, tuple[Offer, ...]] = {}
        self._part_paths: dict[str, set[str]] = {}
        self._wanted_at: dict[tuple[str, str], int] = {}  # (path, part's path) -> last step
        self._num_steps = 0
        self._holders: dict[int, list[int]] = {}  # storage -> number of holders, bytes
        self._frames: dict[int, weakref.ref[Frame]] = {}
        self._backward_of: weakref.ref[Frame] | None = None

    def begin_step(self) -> None:
        """Forgets what happened in earlier steps; frames of theirs stay."""
        self.counts, self.peak_bytes, self._backward_of = Counts(), 0, None
        self._num_steps += 1
        self._make_menus()
        self._part_paths = {}
        for (path, part), step in self._wanted_at.items():
            if self._num_steps - step <= _REMEMBERED_STEPS:
                self._part_paths.setdefault(path, set()).add(part)

    def _make_menus(self) -> None:
        """From the profiles of the last step, if it made any."""
        profiles, self._profiles = self._profiles, {}
        for key, profile in zip(profiles, smoothed(list(profiles.values())), strict=True):
            self.menus[key] = self._menu_of_path[key.path] = menu(profile)

    # --- storages ---------------------------------------------------------------------------------

    def hold(self, tensor: torch.Tensor, keys: Sequence[int]) -> int:
        """Counts one more holder of a tensor's storages; bytes that were not held before."""
        added = 0
        for position, key in enumerate(keys):
            entry = self._holders.get(key)
            if entry is None:
                part = tensor if len(keys) == 1 else parts_of(tensor)[position]
                entry = self._holders[key] = [0, part.untyped_storage().nbytes()]
                added += entry[1]
            entry[0] += 1
        self.held_bytes += added
        return added

    def let_go(self, keys: Sequence[int]) -> int:
        """Counts one holder less of each storage; bytes that are not held any more."""
        freed = 0
        for key in keys:
            entry = self._holders[key]
            entry[0] -= 1
            if not entry[0]:
                freed += entry[1]
                del self._holders[key]
        self.held_bytes -= freed
        return freed

    def bytes_if_held(self, key: int, count: int) -> int:
        """Bytes of a storage that has so many holders, and no more; else 0."""
        num_holders, num_bytes = self._holders[key]
        return num_bytes if num_holders == count else 0

    # --- frames -----------------------------------------------------------------------------------

    @contextmanager
    def inside_frame(self) -> Iterator[None]:
        """Calls within are part of a frame."""
        was_inside, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = was_inside

    def part_paths(self, path: str) -> Set[str]:
        """Paths of the parts of a frame that take what a second run needs.

        Those that memory was short for in the last steps: each costs a fraction of a millisecond.
        """
        return self._part_paths.get(path, frozenset())

    def _want_parts(self, frame: Frame) -> None:
        """Notes the parts of the best offer of a frame, whether or not they can run."""
        position = 0 if frame.present is None else frame.offers.index(frame.present) + 1
        for part in frame.offers[position].parts:
            self._wanted_at[frame.key.path, part.path] = self._num_steps

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
        if self.is_profiling:
            self._profiles[frame.key] = frame.profile()
        known = self.menus.get(frame.key, self._menu_of_path.get(frame.key.path))
        frame.offers = (frame.everything(),) if known is None else known
        if self.budget_bytes is None:
            self._drop(frame, wholly=True)
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
            scaled = needed - frame.num_bytes / max(self.scale, 1e-9)
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
        prices = [
            (_price(each, offer, position), each.order, each)
            for each in live
            if (offer := each.next_offer) is not None
        ]
        if not prices:
            return False
        self._drop(min(prices)[2])
        return True

    def lower_budget(self, key: FrameKey, share: float) -> int | None:
        """Takes a share of the live bytes in a frame's forward as the budget, if that is less.

        Returns:
            The new budget; None if it stays.
        """
        if self.needs is None or self.budget_bytes is None:
            return None
        live = self.held_bytes + int(self.needs.of(key).forward_bytes * self.scale)
        lowered = max(int(share * live), self.needs.minimum_bytes)
        if lowered >= self.budget_bytes:
            return None
        self.budget_bytes = lowered
        return lowered

    def _make_room(self, needed_bytes: int, *, position: int, but: Frame | None = None) -> None:
        assert self.budget_bytes is not None
        needed = int(needed_bytes * self.scale)
        while self.held_bytes + needed > self.budget_bytes:
            if not self.drop_one(position, but):
                break
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + needed)

    def _drop(self, frame: Frame, *, wholly: bool = False) -> None:
        if frame.next_offer is None:
            return
        self.counts.num_dropped += frame.present is None
        if wholly:
            frame.drop_all()
        else:
            self._want_parts(frame)
            frame.drop_next()


def _price(frame: Frame, offer: Offer, position: int) -> float:
    """Seconds for each byte, and for each frame that lies between now and its backward."""
    before = frame.present
    seconds, num_bytes = offer.seconds, offer.num_bytes
    if before is not None:
        seconds, num_bytes = seconds - before.seconds, num_bytes - before.num_bytes
    return seconds / (max(1, num_bytes) * max(1, position - frame.order))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, if it is no wrapper."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    values = [getattr(tensor, name) for name in flatten()[0]]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]  # no device mesh
    return [part for value in tensors for part in parts_of(value)]


def storages_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Keys of the storages of a tensor, or of the tensors that it is made of."""
    if type(tensor) in _PLAIN:
        return (storage_id(tensor),)
    return tuple(storage_id(part) for part in parts_of(tensor))
