"""Saved values on a disk: what `torch.autograd.graph.save_on_cpu` does for a GPU, for the CPU.

Saved tensors are packed by hooks: the bytes go to a file, and the graph holds their place in it.
Copies are those of this project, so all of them reach the same disk at the same rate. What differs
is what moves and when.

- As `save_on_cpu` does, each copy is waited for at once, out and back.
- As offloading trainers do with streams (torchtune, TRL), copies out run beside the forward with a
  few in flight, and each copy back begins when the value packed behind it is read.

Parameters stay, which spares a peer what would only slow it down; so does a tensor that is smaller
than a block of the file.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import Workload
from bench.peers.checkpoint import checkpoint_layers
from rockmate.offload.disk_tier import DiskSlab, DiskTier, FileCopy
from rockmate.schedule.move import SLOT_ALIGNMENT

_SLAB_BYTES = 64 << 20
_IN_FLIGHT = 5
"""As `max_fwd_stash_size` of TRL and torchtune."""


class _Slab:
    """A part of the disk that fills up; it goes back to the tier with its last value."""

    def __init__(self, slab: DiskSlab, num_bytes: int) -> None:
        self.slab, self.free_bytes, self.offset = slab, num_bytes, 0
        weakref.finalize(self, slab.release).atexit = False

    def take(self, num_bytes: int) -> int:
        """The offset of so many bytes."""
        size = -(-num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        offset = self.offset
        self.offset, self.free_bytes = offset + size, self.free_bytes - size
        return offset


class _Away:
    """A tensor that is on the disk."""

    def __init__(self, value: Tensor, slab: _Slab) -> None:
        data = value.detach()
        self._slab, self._offset = slab, slab.take(data.nbytes)
        self._shape, self._dtype = data.shape, data.dtype
        self._out: FileCopy | None = slab.slab.copy_out(self._offset, _bytes_of(data))
        self._back: tuple[Tensor, FileCopy] | None = None
        self.before: weakref.ref[_Away] | None = None

    def join(self) -> None:
        """Waits for the copy out."""
        if self._out is not None:
            self._out.wait()
            self._out = None

    def fetch(self) -> None:
        """Begins the copy back, if it has not begun."""
        if self._back is None:
            target = torch.empty(self._shape, dtype=self._dtype)
            self._back = target, self._slab.slab.copy_in(self._offset, _bytes_of(target))

    def value(self) -> Tensor:
        """The tensor, back in memory."""
        self.fetch()
        assert self._back is not None
        (value, copy), self._back = self._back, None
        copy.wait()
        return value


class DiskStash:
    """The hooks for saved tensors.

    Args:
        tier: where the bytes go.
        in_flight: copies out that may run beside the forward; 0 waits for each.
        kept: tensors that stay, and all views of them.
    """

    def __init__(self, tier: DiskTier, in_flight: int, kept: Iterable[Tensor] = ()) -> None:
        self._tier, self._in_flight = tier, in_flight
        self._kept = {value.untyped_storage().data_ptr() for value in kept}
        self._slab: _Slab | None = None
        self._leaving: deque[_Away] = deque()
        self._last: weakref.ref[_Away] | None = None

    def pack(self, value: Tensor) -> Any:
        """Sends a tensor away."""
        if not _is_movable(value) or value.untyped_storage().data_ptr() in self._kept:
            return value
        if self._slab is None or self._slab.free_bytes < value.nbytes + SLOT_ALIGNMENT:
            num_bytes = max(_SLAB_BYTES, value.nbytes + SLOT_ALIGNMENT)
            self._slab = _Slab(self._tier.borrow(num_bytes), num_bytes)
        away = _Away(value, self._slab)
        away.before, self._last = self._last, weakref.ref(away)
        self._leaving.append(away)
        while len(self._leaving) > self._in_flight:
            self._leaving.popleft().join()
        return away

    def unpack(self, packed: Any) -> Tensor:
        """Brings a tensor back, and begins to bring the one packed before it."""
        if isinstance(packed, Tensor):
            return packed
        # The next forward begins elsewhere, and the last values of this one have all been sent.
        self._slab = None
        while self._leaving:
            self._leaving.popleft().join()
        packed.fetch()
        before = packed.before and packed.before()
        if self._in_flight and before is not None:
            before.fetch()
        return packed.value()


@contextmanager
def offloaded_to_disk(
    workload: Workload, *, tier: DiskTier, in_flight: int = _IN_FLIGHT, checkpoints: bool = False
) -> Iterator[nn.Module]:
    """Every saved tensor goes to the disk; with checkpoints, the inputs of layers alone are saved.

    Args:
        workload: the model.
        tier: where they go.
        in_flight: copies out beside the forward; 0 waits for each copy, out and back.
        checkpoints: one non-reentrant checkpoint around every layer.
    """
    stash = DiskStash(tier, in_flight, workload.model.parameters())
    with ExitStack() as stack:
        model = workload.model
        if checkpoints:
            model = stack.enter_context(checkpoint_layers(workload))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(stash.pack, stash.unpack))
        yield model


def _is_movable(value: Tensor) -> bool:
    is_plain = type(value) is Tensor and value.layout is torch.strided
    is_whole = value.untyped_storage().nbytes() >= value.nbytes  # it is not expanded
    return is_plain and is_whole and value.nbytes >= SLOT_ALIGNMENT


def _bytes_of(value: Tensor) -> Tensor:
    """The tensor's own bytes, of one dimension."""
    return value.contiguous().view(-1).view(torch.uint8)
