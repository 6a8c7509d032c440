"""A memory tier: pieces of it that steps borrow, and copies to and from them."""

from __future__ import annotations

import abc
from typing import Any, Generic, Protocol, TypeVar

import torch

from rockmate.errors import OffloadError


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


class Slab(abc.ABC):
    """Bytes of a tier that one step has to itself, and then another one.

    Copies take tensors of bytes (`uint8`, one dimension). They refer to them until they have ended.

    Attributes:
        num_bytes: its size.
        is_busy: whether a copy to or from it is under way that the next step would wait for.
        tier: that has lent it; None of one that is idle, to which the tier refers.
    """

    is_busy: bool = False

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.tier: Any = None

    @abc.abstractmethod
    def copy_out(self, offset: int, source: torch.Tensor) -> Pending:
        """Begins to copy a tensor to the bytes from `offset` on."""

    @abc.abstractmethod
    def copy_in(self, offset: int, target: torch.Tensor) -> Pending:
        """Begins to fill a tensor with the bytes from `offset` on, behind copies to them."""

    @abc.abstractmethod
    def view(self, offset: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Bytes from `offset` on as a tensor of a device: what is written to it is there."""

    @abc.abstractmethod
    def join(self) -> None:
        """Waits until all copies have ended, well or not."""

    def release(self) -> None:
        """Gives the bytes back to the tier; copies may still be under way."""
        tier, self.tier = self.tier, None
        tier.take_back(self)


AnySlab = TypeVar("AnySlab", bound=Slab)


class Tier(abc.ABC, Generic[AnySlab]):
    """A memory tier, which lends slabs. One that a step no longer needs serves the next one.

    Args:
        limit_bytes: most bytes of all slabs together; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._free: list[AnySlab] = []
        self._num_lent_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._num_lent_bytes + sum(slab.num_bytes for slab in self._free)

    def borrow(self, num_bytes: int) -> AnySlab:
        """A slab of at least so many bytes.

        Raises:
            OffloadError: the tier has no more room, or the user's limit on it is reached.
        """
        fitting = [slab for slab in self._free if slab.num_bytes >= num_bytes]
        if fitting:
            slab = min(fitting, key=lambda slab: (slab.is_busy, slab.num_bytes))
            self._free.remove(slab)
            slab.join()
        else:
            # Smaller ones serve no step like this.
            while self._free:
                self._free.pop().join()
            self._check_limit(num_bytes)
            slab = self._new_slab(num_bytes)
        self._num_lent_bytes += slab.num_bytes
        slab.tier = self
        return slab

    def take_back(self, slab: AnySlab) -> None:
        """Takes a slab back, whose last copy may still be under way."""
        self._num_lent_bytes -= slab.num_bytes
        self._free.append(slab)

    @abc.abstractmethod
    def _new_slab(self, num_bytes: int) -> AnySlab: ...

    def _check_limit(self, num_bytes: int) -> None:
        taken_bytes, limit_bytes = self._num_lent_bytes, self._limit_bytes
        if limit_bytes is not None and taken_bytes + num_bytes > limit_bytes:
            msg = (
                f"moved values of this step take {num_bytes:,} bytes beside {taken_bytes:,} of "
                f"steps whose backward has not run, and host_budget is {limit_bytes:,}. Raise it, "
                "or run each backward before the next forward."
            )
            raise OffloadError(msg)
