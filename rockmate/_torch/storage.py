"""Memory identity: which tensors share a storage, and whether a tensor was written in place."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["StorageWeakRef"]

_version_of = attrgetter("_version")


def storage_id(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """A number that is equal for tensors of one storage, as long as that storage lives.

    `data_ptr()` is the public way. It is 0 for every fake tensor and for every empty storage.
    """
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    return storage._cdata


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def version_of(tensor: torch.Tensor) -> int:
    """The number of in-place writes to a tensor's memory. No public name gives it.

    Tensors made in inference mode count none. Autograd does not save them.
    """
    try:
        return tensor._version
    except RuntimeError:
        if tensor.is_inference():
            return 0
        raise


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`version_of` each, in a fraction of the time."""
    tensors = list(tensors)
    try:
        return list(map(_version_of, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def base_of(tensor: object) -> torch.Tensor | None:
    """The tensor that a differentiable view was taken from; None for any other object."""
    return getattr(tensor, "_base", None)
