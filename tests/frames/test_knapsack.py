"""What is decided ahead, against a search through all choices."""

from __future__ import annotations

import itertools
import random

from rockmate.frames.call_history import CallHistory
from rockmate.frames.knapsack import KnownFrame, bound_s, decide
from rockmate.frames.needs import FrameKey, Needs, Option, StepNeeds


def random_frames(draw: random.Random) -> list[KnownFrame]:
    """Frames of some hundred bytes, with options in no order."""
    frames = []
    for number in range(draw.randint(1, 5)):
        saved = draw.randint(0, 400)
        peak, after = draw.randint(0, 300), draw.randint(0, 300)
        options = [Option(saved, peak, 0.0, is_kept=True)]
        options += [
            Option(draw.randint(0, saved - 1), draw.randint(0, 300), draw.random(), schedule)
            for schedule in range(draw.randint(0, 3) if saved else 0)
        ]
        if saved:
            options.append(Option(0, peak, draw.random() + 0.5))
        frames.append(KnownFrame(FrameKey("block", number), after, options))
    return frames


def peak_of(frames: list[KnownFrame], chosen: tuple[Option, ...]) -> int:
    """Runs through a step, frame by frame."""
    held = peak = 0
    for frame, option in zip(frames, chosen, strict=True):
        peak = max(peak, held + option.peak_bytes)
        held += option.held_bytes
        peak = max(peak, held + frame.after_bytes)
    return peak


def test_decisions_fit_and_no_other_ones_are_faster() -> None:
    num_tight = 0
    for seed in range(150):
        draw = random.Random(seed)
        frames = random_frames(draw)
        budget = draw.randint(100, 2000)
        everything = itertools.product(*(frame.options for frame in frames))
        fitting = [each for each in everything if peak_of(frames, each) <= budget]
        decision, bound = decide(frames, budget), bound_s(frames, budget)
        if not fitting:
            assert decision is None
            continue
        best = min(sum(option.seconds for option in each) for each in fitting)
        assert bound is not None
        assert bound <= best + 1e-9
        if decision is None:  # only by the rounding of held bytes
            assert min(peak_of(frames, each) for each in fitting) > 0.995 * budget
            continue
        chosen = tuple(decision[frame.key] for frame in frames)
        seconds = sum(option.seconds for option in chosen)
        assert peak_of(frames, chosen) <= budget
        assert seconds >= best - 1e-9
        # Units are of the budget's 2,048th: all that fits with so much room is found.
        roomy = [each for each in fitting if peak_of(frames, each) <= 0.995 * budget]
        if roomy:
            least = min(sum(option.seconds for option in each) for each in roomy)
            assert seconds <= least + 1e-9
            num_tight += least > 0
    assert num_tight > 30


def test_frames_of_half_of_the_steps_count_by_half() -> None:
    """On average two of four frames come, and all of these may hold what they save."""
    options = [Option(100, 0, 0.0, is_kept=True), Option(0, 0, 0.010)]
    frames = [KnownFrame(FrameKey("layer", i), 0, options, share=0.5) for i in range(4)]
    for budget, num_dropped in ((210, 0), (160, 1), (110, 2)):
        decision = decide(frames, budget)
        assert decision is not None
        assert sum(not each.is_kept for each in decision.values()) == num_dropped
    surely = decide([each._replace(share=1.0) for each in frames], 210)
    assert surely is not None
    assert sum(not each.is_kept for each in surely.values()) == 2


def test_shares_of_steps_follow_the_calls_of_the_last_steps() -> None:
    calls = CallHistory()
    for step in range(32):
        calls.begin_step(None)
        for layer in range(4):
            if layer == 0 or (step + layer) % 4:  # each of the others is left out in turn
                calls.present.append(FrameKey("layer", layer))
    calls.begin_step(None)
    shares = {key.number: share for key, share in calls.shares().items()}
    assert shares == {0: 1.0, 1: 0.75, 2: 0.75, 3: 0.75}


def test_a_call_that_was_not_recorded_raises_the_needs_of_those_that_follow() -> None:
    a, b, c = (FrameKey("a", number) for number in range(3))
    step = StepNeeds({a: Needs(10, 20, 30, 9, 5, 1.0, 3, 4), c: Needs(40, 50, 60, 9, 7, 2.0, 5, 6)})
    step.take(b, a, 100)
    assert list(step.by_key) == [a, b, c]
    assert step.by_key[a] == Needs(10, 20, 30, 9, 5, 1.0, 3, 4)
    assert step.by_key[b] == Needs(140, 150, 160, 109, 7, 2.0, 105, 106, taken_bytes=100)
    assert step.by_key[c] == Needs(140, 150, 160, 109, 7, 2.0, 105, 106, taken_bytes=100)
    step.take(FrameKey("b", 0), None, 1)
    assert next(iter(step.by_key)) == FrameKey("b", 0)
    assert step.minimum_bytes == 161
    step.take(FrameKey("b", 1), FrameKey("b", 0), 1)  # what was added before counts once
    assert step.by_key[FrameKey("b", 1)].forward_bytes == 42
