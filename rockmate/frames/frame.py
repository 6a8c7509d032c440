"""A frame: one call of a submodule, and what autograd has saved in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from rockmate._torch.engine import call_before_backward, keeps_graph, saving
from rockmate._torch.storage import version_of
from rockmate.errors import BackwardError, UnsupportedModelError
from rockmate.frames.call import Arguments, Call
from rockmate.frames.in_flight import Step
from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey, ScheduleCost
from rockmate.frames.slots import Saved, Slot, Slots, checked
from rockmate.state.tensors import storages_of, tensors_in


class Frame:
    """One call of a submodule.

    Attributes:
        key: which call.
        order: position among all frames, by the beginning of their calls.
        step: the forward of the model that it belongs to.
        seconds: that its forward took.
        is_recomputed: whether it was dropped and has been recomputed. It then stays, at least while
            its backward runs.
    """

    schedule = None
    """It runs as in eager."""

    def __init__(self, call: Call, order: int, memory: Memory) -> None:
        self.key, self.order, self._memory = call.key, order, memory
        self.step = memory.in_flight.present
        self._call = call
        self._outside = call.outside_storages()
        self._slots = Slots(memory.storages)
        self.seconds, self.is_recomputed = 0.0, False

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds and no other frame does."""
        return self._slots.num_bytes

    # --- the forward ------------------------------------------------------------------------------

    def run(self) -> Any:
        """The call's result. What autograd saves meanwhile goes into the frame."""
        begin_s = self._memory.clock()
        try:
            with saving(self._pack, self._unpack):
                output = self._call.run()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            msg = (
                f"{self.key} differentiates by torch.func, within which nothing sees what autograd "
                f"saves. Leave all like it whole: {self._memory.calls.alike(self.key.path)}."
            )
            raise UnsupportedModelError(msg) from error
        self.seconds = self._memory.clock() - begin_s
        self._outside = {}
        self._call.end()
        self._slots.keep_returned(output)
        return output

    def _pack(self, tensor: torch.Tensor) -> Any:
        keys, version = storages_of(tensor), version_of(tensor)
        if self._outside.keys() >= set(keys):
            return Saved(tensor, keys, version)
        return self._slots.add(tensor, keys, version)

    def note_backward_of(self, output: Any) -> None:
        """Has the backward of a result noted, also where a frame has saved nothing to read.

        The graph outlives what autograd has saved, by as long as the script holds its loss, so it
        must not hold the frame.
        """
        frame: weakref.ref[Frame] = weakref.ref(self)
        begin = partial(_begin_backward, frame, self._memory)
        call_before_backward(tensors_in(output), begin)
        if self._memory.measuring.is_on:
            end = partial(self._memory.end_backward, self.key, self.order)
            call_before_backward(self._call.inputs, end)

    # --- the backward -----------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Slot):
            if self._memory.backward.order != self.order:
                self._memory.begin_backward(self)
            if packed.saved is None:
                self.recompute()
            packed = packed.saved
        assert packed is not None
        return checked(packed, self.key)

    # --- dropping ---------------------------------------------------------------------------------

    @property
    def can_be_dropped(self) -> bool:
        """Whether it holds something, and can recompute it once, as it was."""
        is_able = self.num_bytes and not self.is_recomputed and not self._call.cannot_repeat
        return bool(is_able) and not self._call.has_changed_inputs()

    def drop(self) -> None:
        """Drops what it has saved, until the backward reads it."""
        memory = self._memory
        # Kernels of a GPU may differ in the last bit, and save seeds that nothing has written.
        is_compared = memory.measuring.recorder is not None or memory.log.tried is not None
        for slot in self._slots.needed().values():
            if is_compared and memory.device.type == "cpu":
                slot.note_bits()
            slot.free()

    def take_back(self) -> None:
        """Its backward has run, and the graph is kept for another one: it may be dropped again."""
        if self.is_recomputed:
            self.is_recomputed = False
            self._memory.hold(self)

    def recompute(self) -> None:
        """Runs the forward again. Where memory runs out, others are dropped, and it runs anew.

        Errors are those of `_saved_again`.
        """
        memory = self._memory
        is_compared = memory.measuring.recorder is not None and memory.device.type == "cpu"
        is_compared |= memory.log.tried is not None
        values = self._call.parameter_bits() if is_compared else None
        begin = memory.clock()
        self.is_recomputed = True
        missing = {at: each for at, each in self._slots.needed().items() if each.saved is None}
        while missing:
            try:
                made = _saved_again(self._call, self._slots.shapes, last=max(missing))
                break
            except Exception as error:
                if not memory.can_retry(error, but=self):
                    raise
        for index, slot in missing.items():
            if not slot.fill(made[index]):
                first = f"saved a tensor {list(made[index].tensor.shape)}"
                raise self._call.not_repeated(first, "one with other values")
        memory.note_recomputation(self.key, memory.clock() - begin)
        if values not in (None, self._call.parameter_bits()):  # the run ends before the first did
            raise self._call.not_repeated("changed a parameter for a while", "for good")


def _begin_backward(reference: weakref.ref[Frame], memory: Memory, _: Any) -> None:
    frame = reference()
    if frame is not None:
        memory.begin_backward(frame)


class _CompleteError(Exception):
    """Ends a second run of a forward when everything is made that was dropped."""


def _saved_again(
    call: Call, shapes: Sequence[tuple[torch.Size, torch.dtype]], last: int
) -> list[Saved]:
    """What a second run of a call saves, in order, up to the last that is wanted.

    Args:
        call: runs again.
        shapes: shape and type of what the first run has saved.
        last: position of the last tensor that is wanted.

    Raises:
        UnsupportedModelError: the run saves other tensors than the first.
        BackwardError: it runs a backward.
    """
    made: list[Saved] = []
    outside = {*call.outside_storages()}

    def collect(tensor: torch.Tensor) -> None:
        keys, position = storages_of(tensor), len(made)
        if outside.issuperset(keys):
            return
        known = shapes[position] if position < len(shapes) else None
        if known != (tensor.shape, tensor.dtype):
            first = "no more" if known is None else _text(*known)
            raise call.not_repeated(f"saved {first}", _text(tensor.shape, tensor.dtype))
        made.append(Saved(tensor.detach(), keys, version_of(tensor)))
        if position == last:
            raise _CompleteError

    def refuse_backward(_: Any) -> Any:  # what it reads is not held
        msg = (
            f"{call.key} runs a backward within its forward, which cannot run again. Leave it "
            f"whole: keep={[call.key.path]!r}."
        )
        raise BackwardError(msg)

    with call.again() as (forward, members):
        outside |= members.keys()
        try:
            with saving(collect, refuse_backward):
                forward()
        except Exception:  # TorchScript has an error of its own for `_CompleteError`
            if len(made) <= last:
                raise
    if len(made) <= last:
        raise call.not_repeated(f"saved {last + 1} tensors", f"{len(made)}")
    return made


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor {str(dtype).removeprefix('torch.')}{list(shape)}"


class KeptFrame:
    """One call of a submodule that drops nothing later: as in eager, or by a schedule, unhooked.

    It holds what it saves until its backward has ended. A hook of the graph that the call makes
    holds it. So it goes when the graph goes, if no backward runs before.

    Attributes:
        key: which call.
        order: position among all frames, by the beginning of their calls.
        step: the forward of the model that it belongs to.
        num_bytes: that it holds: as known from calls before, or as the schedule says.
        schedule: of a captured inside; None if it runs as in eager.
    """

    def __init__(
        self,
        key: FrameKey,
        order: int,
        memory: Memory,
        num_bytes: int,
        schedule: ScheduleCost | None = None,
    ) -> None:
        """Counts nothing yet."""
        self.key, self.order, self._memory, self.schedule = key, order, memory, schedule
        self.step = memory.in_flight.present
        self._known_bytes, self.num_bytes = num_bytes, 0

    def end_forward(self, output: Any) -> None:
        """The forward has run: takes its place among what is held."""
        if call_before_backward(tensors_in(output), self._begin_backward):
            self.num_bytes = self._known_bytes
        self._memory.end_kept(self)

    def _begin_backward(self, _: Any) -> None:
        self._memory.begin_backward(self)
        if not keeps_graph():  # nothing is counted before the backward of another one begins
            self.release()

    def take_back(self) -> None:
        """It drops nothing."""

    def release(self) -> None:
        """What it saved is free."""
        self._memory.storages.kept_bytes -= self.num_bytes
        self.num_bytes, self.step = 0, Step(0)  # the script may hold the graph

    def __del__(self) -> None:
        """The graph is free."""
        self.release()


def unhooked(
    find: Callable[[str, Arguments], Any] | None,
    memory: Memory,
    key: FrameKey,
    arguments: Arguments,
    *,
    sizes: Hashable,
    order: int,
) -> tuple[KeptFrame | None, Callable[[], Any]]:
    """A frame that drops nothing later, and what runs; None if it is to have hooks.

    `find` gives the captured inside of a call, and its tensors.
    """
    forward, args, kwargs = arguments
    found = find(key.path, arguments) if find is not None and memory.may_run_schedule(key) else None
    if found is not None:
        interior, tensors = found
        number = memory.schedule_for(key, interior.schedules)
        if number is not None:
            schedule = interior.schedules[number]
            planned = KeptFrame(key, order, memory, schedule.held_bytes, schedule)
            return planned, lambda: interior.run(number, tensors)
    kept_bytes = memory.bytes_if_kept(key, sizes)
    kept = None if kept_bytes is None else KeptFrame(key, order, memory, kept_bytes)
    return kept, lambda: forward(*args, **kwargs)
