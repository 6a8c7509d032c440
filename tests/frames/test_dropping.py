"""Which frame is dropped next: what was decided ahead, then what takes the least for its bytes."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass

import pytest
import torch

from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey


@dataclass(eq=False)
class Asked:
    """A frame that answers what it was told to."""

    key: FrameKey
    order: int
    seconds: float
    num_bytes: int
    can_be_dropped: bool

    def drop(self) -> None:
        self.can_be_dropped = False


def random_frame(draw: random.Random, order: int) -> Asked:
    able = draw.random() < 0.7
    return Asked(FrameKey("block", order), order, draw.random(), draw.randint(1, 9), able)


def price(frame: Asked, position: int) -> tuple[float, int]:
    """By one rule over all frames."""
    return frame.seconds / (frame.num_bytes * max(1, position - frame.order)), frame.order


@pytest.mark.parametrize("seed", range(60))
def test_the_frames_that_are_dropped(seed: int) -> None:
    draw = random.Random(seed)
    frames = [random_frame(draw, order) for order in range(draw.randint(0, 9))]
    planned = [each for each in frames if draw.random() < 0.3]
    memory = Memory(torch.device("cpu"), lambda: True)
    memory._frames = [weakref.ref(each) for each in frames]  # type: ignore
    memory._planned.extend(weakref.ref(each) for each in planned)  # type: ignore
    able = [each for each in frames if each.can_be_dropped]
    first = [each for each in planned if each.can_be_dropped]
    first += sorted((each for each in able if each not in first), key=lambda each: price(each, 9))
    for number, expected in enumerate(first):
        assert memory.drop_one(9)
        assert set(memory.dropped) == {each.key for each in first[: number + 1]}
        assert not expected.can_be_dropped
    assert not memory.drop_one(9)


def test_all_drops_of_a_step_ask_a_number_of_frames_that_grows_little_faster_than_theirs() -> None:
    def asked(num_frames: int) -> int:
        num_asked = 0

        class Counted(Asked):
            @property
            def able(self) -> bool:
                nonlocal num_asked
                num_asked += 1
                return self.num_bytes > 0

            def drop(self) -> None:
                self.num_bytes = 0

        Counted.can_be_dropped = Counted.able  # type: ignore
        frames = [object.__new__(Counted) for _ in range(num_frames)]
        for order, each in enumerate(frames):
            each.key, each.order = FrameKey("block", order), order
            each.seconds, each.num_bytes = 1.0, 1
        memory = Memory(torch.device("cpu"), lambda: True)
        memory._frames = [weakref.ref(each) for each in frames]  # type: ignore
        while memory.drop_one(num_frames):
            pass
        return num_asked

    assert asked(800) < 2.5 * asked(400)
