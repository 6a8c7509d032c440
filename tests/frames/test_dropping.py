"""Which frame is dropped next: what was decided ahead, then the oldest."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey


@dataclass(eq=False)
class Asked:
    """A frame that answers what it was told to."""

    key: FrameKey
    num_bytes: int
    can_be_dropped: bool

    def drop(self) -> None:
        self.can_be_dropped = False


@pytest.mark.parametrize("seed", range(20))
def test_the_frames_that_are_dropped(seed: int) -> None:
    draw = random.Random(seed)
    frames = [
        Asked(FrameKey("block", order), draw.randint(1, 9), draw.random() < 0.7)
        for order in range(draw.randint(0, 9))
    ]
    decided = [each for each in frames if draw.random() < 0.3]
    others = [each for each in frames if each not in decided]
    memory = Memory(torch.device("cpu"), lambda: None)
    for each in frames:
        memory._queue.add(each, is_decided=each in decided)  # type: ignore
    in_backward = draw.choice(frames) if frames else None
    order = [each for each in (*decided, *others) if each.can_be_dropped]
    for number, expected in enumerate(each for each in order if each is not in_backward):
        assert memory.drop_one(in_backward)  # type: ignore
        assert len(memory.log.dropped) == number + 1
        assert not expected.can_be_dropped
    assert not memory.drop_one(in_backward)  # type: ignore
