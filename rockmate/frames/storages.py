"""Which storages are held, by how many, and how many bytes they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rockmate._torch.pytree import tree_leaves, tree_map
from rockmate._torch.storage import storage_id
from rockmate.capture.structure import tensors_within

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are no wrappers of others."""
_SCALARS = (bool, int, float, str)


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

    def let_go(self, keys: Sequence[int]) -> int:
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

    def bytes_if_held(self, key: int, count: int) -> int:
        """Bytes of a storage that has so many holders, and no more; else 0."""
        num_holders, num_bytes = self._holders[key]
        return num_bytes if num_holders == count else 0


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
    if type(tensor) in PLAIN:
        return (storage_id(tensor),)
    return tuple(storage_id(part) for part in parts_of(tensor))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested containers and objects, in their order.

    Each call of a frame asks several times, and arguments are tuples of tensors as a rule.
    """
    kind = type(value)
    if kind in PLAIN:
        return [value]
    if kind is tuple or kind is list:
        return [tensor for each in value for tensor in tensors_in(each)]
    if kind is dict:
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    if value is None or kind in _SCALARS:
        return []
    found: list[torch.Tensor] = []
    for each in tree_leaves(value):
        found += [each] if isinstance(each, torch.Tensor) else tensors_within(each)
    return found


def with_changed(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested containers with each leaf changed.

    Each second run of a frame asks, and PyTorch's own way takes five times as long for arguments as
    they are as a rule.

    Args:
        change: of a leaf, tensor or not.
        value: the containers.
    """
    kind = type(value)
    if kind in PLAIN:
        return change(value)
    if kind is tuple or kind is list:
        return kind([with_changed(change, each) for each in value])
    if kind is dict:
        return {name: with_changed(change, each) for name, each in value.items()}
    return tree_map(change, value)
