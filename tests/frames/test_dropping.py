"""Which frame is dropped next: what was decided ahead, then what takes the least for its bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from rockmate.frames.memory import Memory
from rockmate.frames.menu import Offer
from rockmate.frames.needs import FrameKey


@dataclass(eq=False)
class Asked:
    """A frame that answers what it was told to."""

    key: FrameKey
    order: int
    planned: Offer | None
    taken: Offer | None
    next_offer: Offer | None
    offers: tuple[Offer, ...] = ()

    def drop(self, offer: Offer) -> None:
        self.taken = offer


def offer(draw: random.Random) -> Offer:
    return Offer(draw.randint(1, 9), draw.random(), frozenset(), 1)


def random_frame(draw: random.Random, order: int) -> Asked:
    planned = offer(draw) if draw.random() < 0.5 else None
    taken = draw.choice((None, None, planned, Offer(0, 0.0, frozenset(), 0)))
    following = draw.choice((None, offer(draw)))
    may_be_planned = planned is not None and taken is None and draw.random() < 0.7
    return Asked(FrameKey("block", order), order, planned, taken,
                 planned if may_be_planned else following)  # fmt: skip


def expected(frames: list[Asked], position: int) -> Asked | None:
    """By one rule over all frames."""

    def rank(each: Asked) -> tuple[bool, float, int]:
        assert each.next_offer is not None
        seconds, num_bytes = each.next_offer.seconds, each.next_offer.num_bytes
        if each.taken is not None:
            seconds, num_bytes = seconds - each.taken.seconds, num_bytes - each.taken.num_bytes
        distance = max(1, position - each.order)
        is_other = each.next_offer is not each.planned
        return is_other, seconds / (max(1, num_bytes) * distance), each.order

    able = [each for each in frames if each.next_offer is not None]
    return min(able, key=rank, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_the_frame_that_is_dropped(seed: int) -> None:
    draw = random.Random(seed)
    frames = [random_frame(draw, order) for order in range(draw.randint(0, 6))]
    memory = Memory(torch.device("cpu"), lambda: None)
    memory._frames = {each.order: (lambda each=each: each) for each in frames}  # type: ignore
    offers = {each.order: each.next_offer for each in frames}
    chosen = expected(frames, position=6)
    assert memory.drop_one(6) == (chosen is not None)
    if chosen is not None:
        assert set(memory.given_up) == {chosen.key}
        assert chosen.taken is offers[chosen.order]
