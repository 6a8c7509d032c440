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
from rockmate.frames.part import Part
from rockmate.frames.saved import Saved
from rockmate.state.tensors import storages_of


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

    def run(self, outside: Set[int], last: int, part: Part | None) -> dict[int, Saved]:
        """What the second run saves, by positions.

        Args:
            outside: storages that lie outside of the frame.
            last: position of the last tensor that is wanted.
            part: whose results are wanted, too, if that runs again.

        Raises:
            UnsupportedModelError: the run saves other tensors than the first.
        """
        first = self.position
        with self._call.again() as (forward, members):
            self.outside = {*members, *outside}
            with suppress(CompleteError), saving(self.collect, self._refuse_backward):
                output = forward()
                if part is not None:
                    self.made |= part.results_again(output)
        if self.position <= last:
            expected, found = last + 1 - first, self.position - first
            raise self._call.not_repeated(f"{expected} tensors", f"{found}")
        return self.made

    def collect(self, tensor: torch.Tensor) -> None:
        """Takes one; ends the run after the last.

        Raises:
            UnsupportedModelError: it is another one than in the first run.
        """
        keys = storages_of(tensor)
        if self.outside.issuperset(keys):
            return
        known = self._shapes[self.position] if self.position < len(self._shapes) else None
        if known != (tensor.shape, tensor.dtype):
            first = "no more" if known is None else _text(*known)
            raise self._call.not_repeated(first, _text(tensor.shape, tensor.dtype))
        self.made[self.position] = Saved(tensor.detach(), keys, version_of(tensor))
        self.position += 1
        if self._last is not None and self.position > self._last:
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
