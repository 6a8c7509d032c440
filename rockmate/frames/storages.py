"""Which storages are held, by how many, and how many bytes they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rockmate.state.tensors import parts_of


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
