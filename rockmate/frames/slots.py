"""Tensors that frames have saved, as far as they are held, and the storages of all frames."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from rockmate._torch.storage import version_of
from rockmate.errors import BackwardError
from rockmate.state.digest import bits_of
from rockmate.state.tensors import parts_of, storages_of, tensors_in


class Saved(NamedTuple):
    """A saved tensor, its storages, and the number of in-place writes to it at that time."""

    tensor: torch.Tensor
    storages: tuple[int, ...]
    version: int


class HeldStorages:
    """Storages that frames hold.

    Attributes:
        num_bytes: of all of them.
        kept_bytes: of frames that are kept, whose storages are not known.
    """

    def __init__(self) -> None:
        self.num_bytes = self.kept_bytes = 0
        self._holders: dict[int, list[int]] = {}  # storage -> number of holders, bytes

    def hold(self, saved: Saved) -> int:
        """Counts one more holder of a tensor's storages; bytes that were not held before."""
        before, keys = self.num_bytes, saved.storages
        for position, key in enumerate(keys):
            entry = self._holders.get(key)
            if entry is not None:
                entry[0] += 1
                continue
            part = saved.tensor if len(keys) == 1 else parts_of(saved.tensor)[position]
            num_bytes = part.untyped_storage().nbytes()
            self._holders[key] = [1, num_bytes]
            self.num_bytes += num_bytes
        return self.num_bytes - before

    def free(self, saved: Saved) -> int:
        """Counts one holder less of each storage; bytes that are not held any more."""
        before = self.num_bytes
        for key in saved.storages:
            entry = self._holders[key]
            entry[0] -= 1
            if not entry[0]:
                self.num_bytes -= entry[1]
                del self._holders[key]
        return before - self.num_bytes


class Slot:
    """What autograd holds in place of a tensor that a frame has saved.

    Attributes:
        slots: those of the frame.
        index: position among these.
        saved: the tensor; None if it is dropped.
        is_returned: whether the call also returns it, so that its reader has it anyway.
    """

    __slots__ = ("__weakref__", "_bits", "index", "is_returned", "saved", "slots")

    def __init__(self, slots: Slots, index: int, saved: Saved) -> None:
        self.slots, self.index, self.is_returned = slots, index, False
        self.saved: Saved | None = saved
        self._bits: int | None = None

    def __del__(self) -> None:
        if not self.is_returned:
            self.free()

    def free(self) -> None:
        """The frame holds it no more."""
        if self.saved is not None:
            self.slots.num_bytes -= self.slots.storages.free(self.saved)
            self.saved = None

    def fill(self, saved: Saved) -> bool:
        """Holds it again; whether it has the bits that were noted, if any were."""
        self.slots.num_bytes += self.slots.storages.hold(saved)
        self.saved = saved
        return self._bits is None or self._bits == bits_of(saved.tensor)

    def note_bits(self) -> None:
        """Notes them, but not those of a workspace, which may be unwritten."""
        tensor = None if self.saved is None else self.saved.tensor
        if tensor is not None and tensor.dtype != torch.uint8:
            self._bits = bits_of(tensor)


class Slots:
    """The saved tensors of one frame.

    Attributes:
        storages: that all frames hold.
        shapes: shape and type of each.
        num_bytes: that they hold and no other frame does.
    """

    def __init__(self, storages: HeldStorages) -> None:
        """None yet."""
        self.storages = storages
        self._slots: list[weakref.ref[Slot]] = []
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.num_bytes = 0

    def add(self, tensor: torch.Tensor, keys: tuple[int, ...], version: int) -> Slot:
        """Takes a tensor that is saved."""
        saved = Saved(tensor.detach(), keys, version)
        slot = Slot(self, len(self._slots), saved)
        self._slots.append(weakref.ref(slot))
        self.shapes.append((tensor.shape, tensor.dtype))
        self.num_bytes += self.storages.hold(saved)
        return slot

    def needed(self) -> dict[int, Slot]:
        """By position, those that autograd has yet to read and that the call does not return."""
        live = [slot for each in self._slots if (slot := each()) is not None]
        return {each.index: each for each in live if not each.is_returned}

    def keep_returned(self, output: Any) -> None:
        """Takes out the saved tensors that the call also returns: their reader has them anyway."""
        returned = {key for each in tensors_in(output) for key in storages_of(each)}
        for slot in self.needed().values():
            saved = slot.saved
            if saved is not None and returned.issuperset(saved.storages):
                slot.free()
                slot.saved, slot.is_returned = saved, True


def checked(saved: Saved, name: object) -> torch.Tensor:
    """The tensor, if it is as it was saved.

    Raises:
        RuntimeError: it was changed in place; autograd's own check does not see what hooks hold.
    """
    if version_of(saved.tensor) != saved.version:
        msg = (
            f"a tensor that {name} needs for its gradient has been changed in place: it is "
            f"at version {version_of(saved.tensor)}, and version {saved.version} was saved."
        )
        raise BackwardError(msg)
    return saved.tensor
