"""Outputs that frames take from one another."""

from __future__ import annotations

import torch

from rockmate.frames.handed_on import HandedOn
from rockmate.frames.needs import FrameKey, Needs, StepNeeds
from rockmate.frames.way import Surroundings, Way

KEYS = [FrameKey(name, 0) for name in "abcd"]
WAY = Way(
    held_bytes=10, read_output_bytes=4, forward_bytes=20, backward_bytes=30, added_bytes=37,
    output_gradient_bytes=5, again_s=0.0, seconds=0.5,
)  # fmt: skip


def test_an_output_waits_for_the_frame_that_takes_it() -> None:
    handed_on, values = HandedOn(), [torch.ones(2) for _ in KEYS]
    a, b, c, d = values
    handed_on.note(KEYS[0], [torch.ones(3)], [a])
    handed_on.note(KEYS[1], [a.view(1, 2)], [b])
    handed_on.note(KEYS[2], [torch.ones(3)], [c])
    handed_on.note(KEYS[3], [b, c], [d])
    # a: taken by the next one. b: c runs between. c: taken by the next one. d: by none.
    assert dict(handed_on.waiting()) == {KEYS[2]: [KEYS[1]], KEYS[3]: [KEYS[3]]}


def test_an_output_that_is_free_is_not_taken_for_another_of_the_same_memory() -> None:
    handed_on = HandedOn()
    for key in KEYS[:2]:
        # As a rule the second one lies where the first one lay.
        handed_on.note(key, [torch.ones(1 << 16)], [torch.ones(1 << 16)])
    assert dict(handed_on.waiting()) == {KEYS[0]: [KEYS[0]], KEYS[1]: [KEYS[0], KEYS[1]]}


def test_needs_count_outputs_that_wait_once() -> None:
    step = StepNeeds({key: Needs(100, 100, 100, 0, 0.0, 50, 50) for key in KEYS})
    ways = {"a": [WAY], "b": [WAY]}
    waiting = {KEYS[2]: [KEYS[0], KEYS[1]], KEYS[3]: [KEYS[2]]}
    for number in (1, 2):
        step.take_ways(number, ways, waiting)
        needs = step.by_key[KEYS[2]]
        assert (needs.forward_bytes, needs.after_bytes, needs.backward_bytes) == (108, 108, 108)
        assert (needs.before_forward_bytes, needs.before_backward_bytes) == (58, 58)
        assert step.by_key[KEYS[3]].backward_bytes == 100  # its inside is not captured
    step.take_ways(0, {}, {})
    assert step.by_key[KEYS[2]].backward_bytes == 100


def test_a_way_takes_more_within_some_surroundings() -> None:
    assert WAY.within(Surroundings()) == WAY
    assert WAY.within(Surroundings(adds_gradients=True)).backward_bytes == 37
    both = Surroundings(adds_gradients=True, copies_gradients=True)
    assert WAY.within(both).backward_bytes == 42
    assert WAY.scaled(2.0).read_output_bytes == 8
