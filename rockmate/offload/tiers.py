"""What a step asks of another memory tier, and the tiers of each model, one for each request."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import nn

from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.pinned_tier import PinnedTier
from rockmate.schedule.offload_request import OffloadRequest


class Pending(Protocol):
    """A copy that has been issued."""

    def wait(self) -> None:
        """Has what follows on the device run behind the copy.

        Raises:
            OffloadError: the copy has failed.
        """
        ...

    def took_ms(self) -> float:
        """Milliseconds for which it has run, once it has ended."""
        ...


class Slab(Protocol):
    """Bytes of the tier that one step has to itself.

    Copies take tensors of bytes (`uint8`, one dimension). They refer to them until they have ended.
    """

    def copy_out(self, offset: int, source: torch.Tensor) -> Pending:
        """Begins to copy a tensor to the bytes from `offset` on."""
        ...

    def copy_in(self, offset: int, target: torch.Tensor) -> Pending:
        """Begins to fill a tensor with the bytes from `offset` on, behind copies to them."""
        ...

    def view(self, offset: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Bytes from `offset` on as a tensor of a device: what is written to it is there."""
        ...

    def release(self) -> None:
        """Gives the bytes back to the tier, once the copies that are under way have ended."""
        ...


class Tier(Protocol):
    """A memory tier."""

    def borrow(self, num_bytes: int) -> Slab:
        """A slab of at least so many bytes.

        Raises:
            OffloadError: the tier has no more room, or the user's limit on it is reached.
        """
        ...


_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, dict[OffloadRequest, Tier]]
_OF_MODEL = weakref.WeakKeyDictionary()


def tier_of(model: nn.Module, request: OffloadRequest) -> Tier:
    """The tier that a model's steps move values to."""
    tiers = _OF_MODEL.setdefault(model, {})
    if request not in tiers:
        folder, host_bytes = request.folder, request.host_bytes
        is_disk = request.kind == "disk"
        tiers[request] = DiskTier(folder, host_bytes) if is_disk else PinnedTier(host_bytes)
    return tiers[request]


def forget_tiers(model: nn.Module) -> None:
    """Has a model's next step make its tiers anew; those of pending steps end with them."""
    _OF_MODEL.pop(model, None)
