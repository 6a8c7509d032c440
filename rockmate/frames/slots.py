"""Tensors that frames have saved, as far as they are held, and the storages of all frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._holders: dict[int, list[int]] = {}  # storage -> number of holders, bytes

    def hold(self, tensor: torch.Tensor, keys: Sequence[int]) -> int:
        """Counts one more holder of a tensor's storages; bytes that were not held before."""
        added = 0
        for position, key in enumerate(keys):
            entry = self._holders.get(key)
            if entry is not None:
                entry[0] += 1
                continue
            part = tensor if len(keys) == 1 else parts_of(tensor)[position]
            num_bytes = part.untyped_storage().nbytes()
            self._holders[key] = [1, num_bytes]
            added += num_bytes
        self.num_bytes += added
        return added

    def free(self, keys: Sequence[int]) -> int:
        """Counts one holder less of each storage; bytes that are not held any more."""
        freed = 0
        for key in keys:
            entry = self._holders[key]
            entry[0] -= 1
            if not entry[0]:
                freed += entry[1]
                del self._holders[key]
        self.num_bytes -= freed
        return freed


class Slots:
    """The saved tensors of one frame.

    Attributes:
        shapes: shape and type of each.
        num_bytes: that they hold and no other frame does.
    """

    def __init__(self, storages: HeldStorages) -> None:
        """None yet.

        Args:
            storages: counts what all frames hold.
        """
        self._storages = storages
        self._held: list[Saved | None] = []
        self._dead: set[int] = set()
        self._returned: dict[int, Saved] = {}
        self._digests: dict[int, int] = {}
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        """How many there are, held or not."""
        return len(self._held)

    def add(self, tensor: torch.Tensor, keys: tuple[int, ...], version: int) -> int:
        """Takes a tensor that is saved; its position.

        Args:
            tensor: with its history.
            keys: its storages.
            version: its number of in-place writes.
        """
        self._held.append(Saved(tensor.detach(), keys, version))
        self.shapes.append((tensor.shape, tensor.dtype))
        self.num_bytes += self._storages.hold(tensor, keys)
        return len(self._held) - 1

    def keep_returned(self, output: Any) -> None:
        """Takes out the saved tensors that the call also returns: their reader has them anyway."""
        returned = {key for each in tensors_in(output) for key in storages_of(each)}
        for index, saved in enumerate(self._held):
            if saved is not None and returned.issuperset(saved.storages):
                self.free(index)
                self._returned[index] = saved

    def release(self, index: int) -> None:
        """Autograd needs one of them no more."""
        self._dead.add(index)
        if self._returned:
            self._returned.pop(index, None)
        if index < len(self._held):
            self.free(index)

    def free(self, index: int) -> None:
        """Holds one no more."""
        saved, self._held[index] = self._held[index], None
        if saved is not None:
            self.num_bytes -= self._storages.free(saved.storages)

    def found(self, index: int) -> Saved | None:
        """One of them, if it is in memory."""
        returned = self._returned.get(index) if self._returned else None
        return self._held[index] if returned is None else returned

    def is_needed(self, index: int) -> bool:
        """Whether autograd has yet to read one that is not in memory whatever is dropped."""
        return index not in self._dead and index not in self._returned

    def missing(self, indices: Iterable[int]) -> set[int]:
        """Those of some that are needed and not held."""
        return {each for each in indices if self._held[each] is None and self.is_needed(each)}

    def note_digests(self) -> None:
        """Notes the bits of those that are held, for `is_as_noted`."""
        for index, each in enumerate(self._held):
            if each is not None and _is_compared(each.tensor):
                self._digests[index] = bits_of(each.tensor)

    def is_as_noted(self, index: int, saved: Saved) -> bool:
        """Whether a recomputed tensor has the bits that were noted, if any were."""
        known = self._digests.get(index)
        return known is None or known == bits_of(saved.tensor)

    def fill(self, index: int, saved: Saved) -> None:
        """Holds one again, if that is needed."""
        if self._held[index] is None and self.is_needed(index):
            self.num_bytes += self._storages.hold(saved.tensor, saved.storages)
            self._held[index] = saved


class Slot:
    """What autograd holds in place of a tensor that a frame has saved."""

    __slots__ = ("_slots", "index")

    def __init__(self, slots: Slots, index: int) -> None:
        self._slots, self.index = slots, index

    def __del__(self) -> None:
        self._slots.release(self.index)


def _is_compared(tensor: torch.Tensor) -> bool:
    """Not on a GPU, whose kernels may differ in the last bit, nor in an unwritten workspace."""
    return tensor.device.type == "cpu" and tensor.dtype != torch.uint8


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
