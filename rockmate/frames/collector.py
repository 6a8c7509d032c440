"""Takes what a second run of a forward saves, and holds it against the first."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from typing import Any

import torch

from rockmate._torch.engine import saving
from rockmate._torch.storage import version_of
from rockmate.errors import BackwardError
from rockmate.frames.call import Call
from rockmate.frames.slots import Saved
from rockmate.state.tensors import storages_of


class CompleteError(Exception):
    """Ends a second run of a forward when everything is made that was dropped."""


class Collector:
    """Takes what a second run saves, up to the last that is wanted."""

    def __init__(
        self, call: Call, shapes: Sequence[tuple[torch.Size, torch.dtype]], last: int
    ) -> None:
        """Nothing yet.

        Args:
            call: runs again.
            shapes: shape and type of what the first run has saved.
            last: position of the last tensor that is wanted.
        """
        self._call, self._shapes, self._last = call, shapes, last
        self._outside: set[int] = set()
        self._made: list[Saved] = []

    def run(self, outside: Set[int]) -> list[Saved]:
        """What the second run saves, in order.

        Args:
            outside: storages that lie outside of the frame.

        Raises:
            UnsupportedModelError: the run saves other tensors than the first.
        """
        with self._call.again() as (forward, members):
            self._outside = {*members, *outside}
            with suppress(CompleteError), saving(self._collect, self._refuse_backward):
                forward()
        if len(self._made) <= self._last:
            raise self._call.not_repeated(f"{self._last + 1} tensors", f"{len(self._made)}")
        return self._made

    def _collect(self, tensor: torch.Tensor) -> None:
        """Takes one; ends the run after the last.

        Raises:
            UnsupportedModelError: it is another one than in the first run.
        """
        keys = storages_of(tensor)
        if self._outside.issuperset(keys):
            return
        position = len(self._made)
        known = self._shapes[position] if position < len(self._shapes) else None
        if known != (tensor.shape, tensor.dtype):
            first = "no more" if known is None else _text(*known)
            raise self._call.not_repeated(first, _text(tensor.shape, tensor.dtype))
        self._made.append(Saved(tensor.detach(), keys, version_of(tensor)))
        if position == self._last:
            raise CompleteError

    def _refuse_backward(self, _: Any) -> Any:
        """No backward may run while a forward does: what it reads is not held."""
        msg = (
            f"{self._call.key} runs a backward within its forward, which cannot run again. Leave "
            f"it whole: keep={[self._call.key.path]!r}."
        )
        raise BackwardError(msg)


def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor {str(dtype).removeprefix('torch.')}{list(shape)}"
