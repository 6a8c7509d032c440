"""What is decided ahead, against a search through all choices."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from rockmate.frames.call_history import CallHistory
from rockmate.frames.knapsack import KnownFrame, Option, bound_s, decide
from rockmate.frames.needs import FrameKey, Needs, StepNeeds, merged


def random_frames(draw: random.Random) -> list[KnownFrame]:
    """Frames of some hundred bytes, with options in no order."""
    frames = []
    for number in range(draw.randint(1, 5)):
        saved = draw.randint(0, 400)
        forward, after, backward = (draw.randint(0, 300) for _ in range(3))
        needs = Needs(forward, after, backward, saved)
        options = [
            Option(draw.randint(1, saved), draw.random(), way, draw.randint(0, 300))
            for way in range(draw.randint(0, 3) if saved else 0)
        ]
        if saved:
            options.append(Option(saved, draw.random() + 0.5))
        frames.append(KnownFrame(FrameKey("block", number), needs, options))
    return frames


def peak_of(frames: list[KnownFrame], chosen: tuple[Option | None, ...]) -> int:
    """Runs through a step, frame by frame."""
    held = peak = 0
    for frame, option in zip(frames, chosen, strict=True):
        needs = frame.needs
        is_eager = option is None or option.schedule is None
        own = max(needs.forward_bytes, needs.backward_bytes) if is_eager else option.peak_bytes
        peak = max(peak, held + own)
        held += needs.saved_bytes - (option.num_bytes if option else 0)
        peak = max(peak, held + needs.after_bytes)
    return peak


def test_decisions_fit_and_no_other_ones_are_faster() -> None:
    num_tight = 0
    for seed in range(150):
        draw = random.Random(seed)
        frames = random_frames(draw)
        budget = draw.randint(100, 2000)
        everything = itertools.product(*((None, *frame.choices) for frame in frames))
        fitting = [each for each in everything if peak_of(frames, each) <= budget]
        decision, bound = decide(frames, budget), bound_s(frames, budget)
        if not fitting:
            assert decision is None
            continue
        best = min(sum(option.seconds for option in each if option) for each in fitting)
        assert bound is not None
        assert bound <= best + 1e-9
        if decision is None:  # only by the rounding of held bytes
            assert min(peak_of(frames, each) for each in fitting) > 0.995 * budget
            continue
        chosen = tuple(decision.options.get(frame.key) for frame in frames)
        assert decision.kept == {
            f.key for f, option in zip(frames, chosen, strict=True) if not option
        }
        assert peak_of(frames, chosen) <= budget
        assert decision.seconds_of(decision.options) >= best - 1e-9
        # Units are of the budget's 2,048th: all that fits with so much room is found.
        roomy = [each for each in fitting if peak_of(frames, each) <= 0.995 * budget]
        if roomy:
            least = min(sum(option.seconds for option in each if option) for each in roomy)
            assert decision.seconds_of(decision.options) <= least + 1e-9
            num_tight += least > 0
    assert num_tight > 30


def test_frames_of_half_of_the_steps_count_by_half() -> None:
    """On average two of four frames come, and all of these may hold what they save."""
    needs, options = Needs(saved_bytes=100), [Option(100, 0.010)]
    frames = [KnownFrame(FrameKey("layer", i), needs, options, share=0.5) for i in range(4)]
    for budget, num_given_up in ((210, 0), (160, 1), (110, 2)):
        decision = decide(frames, budget)
        assert decision is not None
        assert len(decision.options) == num_given_up
    surely = decide([replace(each, share=1.0) for each in frames], 210)
    assert surely is not None
    assert len(surely.options) == 2


def test_shares_of_steps_follow_the_calls_of_the_last_steps() -> None:
    calls = CallHistory()
    for step in range(32):
        calls.begin_step(None)
        for layer in range(4):
            if layer == 0 or (step + layer) % 4:  # each of the others is left out in turn
                calls.note(FrameKey("layer", layer))
    calls.begin_step(None)
    found = calls.known_frames(StepNeeds({FrameKey("layer", 0): Needs(1, 1, 1, 1)}))
    assert [each.share for each in found] == [1.0, 0.75, 0.75, 0.75]


def test_calls_of_several_steps_are_merged_in_order() -> None:
    a, b, c, d = (FrameKey(name, 0) for name in "abcd")
    assert merged([a, c], [a, b, c, d]) == [a, b, c, d]
    assert merged([b], [a, b]) == [a, b]
    assert merged([a, b, c], [a, c]) == [a, b, c]
    assert merged([a, b], [b, a, d]) == [a, d, b]


def test_a_call_that_was_not_recorded_raises_the_needs_of_those_that_follow() -> None:
    a, b, c = (FrameKey("a", number) for number in range(3))
    step = StepNeeds({a: Needs(10, 20, 30, 5, 1.0, 3, 4), c: Needs(40, 50, 60, 7, 2.0, 5, 6)})
    step.take(b, a, 100)
    assert step.new_bytes == 100  # until it has its place
    step.settle()
    assert step.new_bytes == 0
    assert list(step.by_key) == [a, b, c]
    assert step.by_key[a] == Needs(10, 20, 30, 5, 1.0, 3, 4)
    assert step.by_key[b] == Needs(140, 150, 160, 7, 2.0, 105, 106)
    assert step.by_key[c] == Needs(140, 150, 160, 7, 2.0, 105, 106)
    step.take(FrameKey("b", 0), None, 1)
    step.settle()
    assert next(iter(step.by_key)) == FrameKey("b", 0)
    assert step.minimum_bytes == 161
