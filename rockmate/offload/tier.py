"""What a step asks of another memory tier."""

from __future__ import annotations

from typing import Protocol

import torch


class Pending(Protocol):
    """A copy that has been issued."""

    def wait(self) -> None:
        """Has what follows on the device run behind the copy.

        Raises:
            OffloadError: the copy has failed.
        """
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
