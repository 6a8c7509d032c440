"""Takes what a second run of a forward saves, and holds it against the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rockmate.errors import BackwardError
from rockmate.frames.call import Call
from rockmate.frames.saved import Saved
from rockmate.frames.storages import storages_of


class CompleteError(Exception):
    """Ends a second run of a forward when everything is made that was dropped."""


class Collector:
    """Takes what a second run saves, up to the last that is wanted."""

    def __init__(
        self,
        call: Call,
        first: int,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        last: int | None,
    ) -> None:
        self._call, self._shapes, self._last = call, shapes, last
        self.outside: set[int] = set()
        self.made: dict[int, Saved] = {}
        self.position = first

    def collect(self, tensor: torch.Tensor) -> None:
        """Takes one; ends the run after the last.

        Raises:
            UnsupportedModelError: it is another one than in the first run.
        """
        if self.outside.issuperset(storages_of(tensor)):
            return
        known = self._shapes[self.position] if self.position < len(self._shapes) else None
        if known != (tensor.shape, tensor.dtype):
            first = "no more" if known is None else _text(*known)
            raise self._call.not_repeated(first, _text(tensor.shape, tensor.dtype))
        self.made[self.position] = Saved.of(tensor)
        self.position += 1
        if self._last is not None and self.position > self._last:
            raise CompleteError


def refuse_backward(_: Any) -> Any:
    """No backward may run while a forward does."""
    msg = "a backward within a forward that runs again"
    raise BackwardError(msg)


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor {str(dtype).removeprefix('torch.')}{list(shape)}"
