"""The moves of one call, from its forward to the end of its backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rockmate._torch.storage import version_of
from rockmate.errors import BackwardError, OffloadError
from rockmate.offload.tier import Pending, Slab
from rockmate.offload.weight_home import WeightHomes
from rockmate.schedule.move import SlotPlan


@dataclass(slots=True)
class _Layout:
    """How to make a tensor of the bytes of its storage."""

    num_bytes: int
    dtype: torch.dtype
    device: torch.device
    offset: int
    sizes: torch.Size
    strides: tuple[int, ...]


class StepMoves:
    """Carries out the moves of one call, which the emitted code names by their index.

    Each method is an event of a move (`rockmate.schedule.move`).

    It moves whole storages: every view of a value comes back with it. Its slab goes back to the
    tier when nothing refers to it any more: after the backward, or with the step's graph.

    Behind the moves, events name fetches of weights, in their order.

    Args:
        slab: bytes of the tier for all slots; None if there are none.
        slots: where each move's bytes wait.
        homes: of the weights.
        weights: of each fetch.
        log: takes each copy back, and its bytes; None for no log.
    """

    def __init__(
        self,
        slab: Slab | None,
        slots: SlotPlan,
        homes: WeightHomes | None = None,
        weights: Sequence[torch.Tensor] = (),
        log: list[tuple[int, Pending]] | None = None,
    ) -> None:
        self._log = log
        self._slots, self._homes, self._weights = slots, homes, weights
        self._versions = [version_of(weight) for weight in weights]
        self._layouts: dict[int, _Layout] = {}
        self._leaving: dict[int, Pending] = {}
        self._coming: dict[int, tuple[Pending | None, int]] = {}  # with the bytes of each
        if slab is not None:
            self._slab = slab
            weakref.finalize(self, slab.release).atexit = False

    def send(self, value: torch.Tensor, index: int) -> None:
        """Begins to copy a value out."""
        source = _bytes_of(value)
        if source.numel() > self._slots.sizes[index]:
            msg = (
                f"a value of {source.numel():,} bytes was planned to take "
                f"{self._slots.sizes[index]:,}, so it cannot be moved. Leave offload out."
            )
            raise OffloadError(msg)
        self._layouts[index] = _Layout(
            num_bytes=source.numel(),
            dtype=value.dtype,
            device=value.device,
            offset=int(value.storage_offset()),
            sizes=value.size(),
            strides=value.stride(),
        )
        self._leaving[index] = self._slab.copy_out(self._slots.offsets[index], source)

    def sent(self, value: torch.Tensor, index: int) -> None:
        """Waits until the copy out has ended, and takes the value, whose last use it is.

        Again for a kept graph: then it has long ended.
        """
        del value
        pending = self._leaving.pop(index, None)
        if pending is not None:
            pending.wait()

    def fetch(self, index: int) -> torch.Tensor:
        """Begins to copy a value back, or a weight; the result is not to be read yet."""
        if index >= len(self._slots.offsets):
            assert self._homes is not None
            number = index - len(self._slots.offsets)
            weight = self._weights[number]
            if version_of(weight) != self._versions[number]:
                msg = (
                    "a weight at home that the backward reads was changed in place after the "
                    "forward. Change it after the backward."
                )
                raise BackwardError(msg)
            value, pending = self._homes.fetch(weight)
            self._coming[index] = pending, value.nbytes
            return value
        layout = self._layouts[index]
        target = torch.empty(layout.num_bytes, dtype=torch.uint8, device=layout.device)
        pending = self._slab.copy_in(self._slots.offsets[index], target)
        self._coming[index] = pending, layout.num_bytes
        value = torch.empty(0, dtype=layout.dtype, device=layout.device)
        return value.set_(target.untyped_storage(), layout.offset, layout.sizes, layout.strides)

    def fetched(self, value: torch.Tensor, index: int) -> torch.Tensor:
        """Waits until the copy back has ended, and returns the value, which may now be read."""
        pending, num_bytes = self._coming.pop(index)
        if pending is not None:
            pending.wait()
            if self._log is not None:
                self._log.append((num_bytes, pending))
        return value


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
