"""A frame: one call of a submodule, and what autograd has saved in it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from rockmate._torch.engine import saving
from rockmate._torch.storage import version_of
from rockmate.frames.call import Call
from rockmate.frames.collector import Collector
from rockmate.frames.memory import Memory
from rockmate.frames.slots import Saved, Slot, Slots, checked
from rockmate.state.tensors import storages_of, tensors_in


class Frame:
    """One call of a submodule.

    Attributes:
        key: which call.
        order: position among all frames, by the beginning of their calls.
        step: the forward of the model that it belongs to.
        seconds: that its forward took.
        is_planned: whether it was decided ahead that it is dropped.
        is_recomputed: whether it was dropped and has been recomputed. It then stays.
    """

    def __init__(self, call: Call, order: int, memory: Memory) -> None:
        """Holds nothing yet.

        Args:
            call: that runs.
            order: see above.
            memory: counts what frames hold.
        """
        self.key, self.order, self._memory = call.key, order, memory
        self.step = memory.in_flight.present
        self._call = call
        self._held_outside = self._call.outside_storages()
        self._outside = frozenset(self._held_outside)
        self._slots = Slots(memory.storages)
        self._num_dropped = 0  # the last that was needed when it was dropped is the last of these
        self.seconds = 0.0
        self.is_planned = self.is_recomputed = False

    schedule = None
    """It runs as in eager."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds and no other frame does."""
        return self._slots.num_bytes

    # --- the forward ------------------------------------------------------------------------------

    def run(self) -> Any:
        """The call's result. What autograd saves meanwhile goes into the frame."""
        begin_s = self._memory.clock()
        with saving(self._pack, self._unpack):
            output = self._call.run()
        self.seconds = self._memory.clock() - begin_s
        self._outside, self._held_outside = frozenset(), {}
        self._call.end()
        self._slots.keep_returned(output)
        return output

    def _pack(self, tensor: torch.Tensor) -> Any:
        keys, version = storages_of(tensor), version_of(tensor)
        if self._outside.issuperset(keys):
            return Saved(tensor, keys, version)
        return Slot(self._slots, self._slots.add(tensor, keys, version))

    def note_backward_of(self, output: Any) -> None:
        """Has the backward of a result noted, also where a frame has saved nothing to read.

        The graph outlives what autograd has saved, by as long as the script holds its loss, so it
        must not hold the frame.
        """
        frame: weakref.ref[Frame] = weakref.ref(self)
        for node in {each.grad_fn for each in tensors_in(output) if each.grad_fn is not None}:
            node.register_prehook(partial(_begin_backward, frame, self._memory))

    # --- the backward -----------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._memory.has_second_derivatives = True
        if isinstance(packed, Slot):
            if self._memory.backward_order != self.order:
                self._memory.begin_backward(self)
            saved = self._slots.found(packed.index) or self._recompute(packed.index)
        else:
            saved = packed
        return checked(saved, self.key)

    # --- dropping ---------------------------------------------------------------------------------

    @property
    def can_be_dropped(self) -> bool:
        """Whether it holds something, and can recompute it once, as it was."""
        is_able = self.num_bytes and not self.is_recomputed and not self._call.cannot_repeat
        return bool(is_able) and not self._call.has_changed_inputs()

    def drop(self) -> None:
        """Drops what it has saved, until the backward reads it."""
        if self._memory.recorder is not None:
            self._slots.note_digests()
        self._num_dropped = 1 + max(filter(self._slots.is_needed, range(len(self._slots))))
        for index in range(self._num_dropped):
            self._slots.free(index)

    def _recompute(self, index: int) -> Saved:
        """Runs the forward again. Where memory runs out, others are dropped, and it runs anew."""
        begin = self._memory.clock()
        self.is_recomputed = True
        while True:
            try:
                made = self._made()
                break
            except Exception as error:
                if not self._memory.can_retry(error, self.order, but=self):
                    raise
        for each, saved in made.items():
            if not self._slots.is_as_noted(each, saved):
                first = f"a tensor {list(saved.tensor.shape)}"
                raise self._call.not_repeated(first, "one with other values")
            self._slots.fill(each, saved)
        self._memory.note_recomputation(self.key, self._memory.clock() - begin)
        saved = self._slots.found(index)
        assert saved is not None
        return saved

    def _made(self) -> dict[int, Saved]:
        """What a second run saves, as far as it is needed."""
        wanted = self._slots.missing(range(self._num_dropped))
        collector = Collector(self._call, self._slots.shapes, last=max(wanted))
        made = collector.run(self._call.outside_storages().keys())
        return {index: made[index] for index in wanted}


def _begin_backward(reference: weakref.ref[Frame], memory: Memory, _: Any) -> None:
    frame = reference()
    if frame is not None:
        memory.begin_backward(frame)
