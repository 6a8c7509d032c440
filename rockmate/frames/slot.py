"""The place of a saved tensor of a frame."""

from __future__ import annotations

from typing import Protocol


class Holder(Protocol):
    """Holds the tensors of slots."""

    def release(self, index: int) -> None: ...  # noqa: D102


class Slot:
    """What autograd holds in place of a tensor that a frame has saved."""

    __slots__ = ("frame", "index")

    def __init__(self, frame: Holder, index: int) -> None:
        self.frame, self.index = frame, index

    def __del__(self) -> None:
        self.frame.release(self.index)
