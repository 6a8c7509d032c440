"""Which frames take what others return: how long an output lives that its own backward reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rockmate.frames.needs import FrameKey
from rockmate.frames.storages import storages_of


class HandedOn:
    """Outputs of the frames of one step, and which frames take them.

    A frame holds what it takes until its backward. So an output that the next frame takes is there
    until the backward of its own frame comes. If a later one takes it, the frames between run their
    backwards beside it. If none takes it, it may be free from the forward on.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self._order: list[FrameKey] = []
        # Of each output that no frame has taken yet: its storage, and its frame. A number of a
        # storage stands for no other one as long as there is a reference.
        self._open: dict[int, tuple[StorageWeakRef, int]] = {}
        self._last_taker: dict[int, int] = {}  # frame -> the last one that takes one of its outputs

    def note(
        self, key: FrameKey, arguments: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """A frame has run.

        Args:
            key: which.
            arguments: that it takes.
            outputs: plain tensors that it returns.
        """
        place = len(self._order)
        self._order.append(key)
        for storage in {storage for each in arguments for storage in storages_of(each)}:
            found = self._open.pop(storage, None)
            if found is not None:
                self._last_taker[found[1]] = place
        references = [StorageWeakRef(each.untyped_storage()) for each in outputs]
        self._open |= {each.cdata: (each, place) for each in references}

    def waiting(self) -> Mapping[FrameKey, Sequence[FrameKey]]:
        """For each frame, those whose outputs are there beside it if they are read again."""
        found = defaultdict[FrameKey, list[FrameKey]](list)
        ends = self._last_taker | {place: len(self._order) for _, place in self._open.values()}
        for place, end in ends.items():
            for between in self._order[place + (end < len(self._order)) : end]:
                found[between].append(self._order[place])
        return found
