"""What a chain, a sequence and the replay accept and refuse; what the package imports."""

from __future__ import annotations

import doctest
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

import rotor
from rotor import (
    Backward,
    Chain,
    ForwardKeep,
    ForwardOnly,
    InfeasibleBudgetError,
    Option,
    Sequence,
    Stage,
    replay,
)

OPTION = Option(
    saved_bytes=5, forward_peak_bytes=6, backward_peak_bytes=9, forward_ms=1.0, backward_ms=2.0
)
STAGE = Stage(
    input_bytes=3,
    output_gradient_bytes=2,
    forward_ms=1.0,
    forward_peak_bytes=4,
    parameter_gradient_bytes=1,
)
CHAIN = Chain(
    stages=(STAGE,) * 3,
    spans={(0, 0): (OPTION,), (1, 1): (OPTION,), (2, 2): (OPTION,), (0, 1): (OPTION,)},
)


def sequence(text: str) -> Sequence:
    """Read the text form back."""
    steps: list[ForwardOnly | ForwardKeep | Backward] = []
    for word in text.split():
        if word[0] == "F":
            steps.append(ForwardOnly(int(word[1:])))
            continue
        span, option = word[1:].split(".")
        first, _, last = span.partition("-")
        steps.append(
            (ForwardKeep if word[0] == "K" else Backward)(
                int(first), int(last or first), int(option)
            )
        )
    return Sequence(tuple(steps))


@pytest.mark.parametrize(
    ("text", "peak_bytes", "time_ms"),
    [
        # Held by the backward of stage 2: two options' saved bytes, and its own peak.
        ("K0.0 K1.0 K2.0 B2.0 B1.0 B0.0", 5 + 5 + 9, 9.0),
        # The backward of stage 2 beside x_2.
        ("F0 F1 K2.0 B2.0 F0 K1.0 B1.0 K0.0 B0.0", 3 + 9 + 1, 12.0),
        # x_1 is held from the first forward to the backward of stage 1, so x_2 comes on top of it.
        ("F0 F1 K2.0 B2.0 K1.0 B1.0 K0.0 B0.0", 3 + 3 + 9, 11.0),
        # The backward of stage 2 beside the kept span, which is more than the span's own.
        ("K0-1.0 K2.0 B2.0 B0-1.0", 5 + 9, 6.0),
    ],
)
def test_replay_counts_by_hand(text: str, peak_bytes: int, time_ms: float) -> None:
    steps = sequence(text)
    assert str(steps) == text
    result = replay(CHAIN, steps)
    assert (result.peak_bytes, result.time_ms) == (peak_bytes, time_ms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "before the backward of stage 2"),
        ("K0.0 K1.0 K2.0 B2.0 B1.0", "before the backward of stage 0"),
        ("K1.0", "step 0, K1.0: boundary 1 is not there"),
        ("F0 K1.0 K2.0 B1.0", "gradient in hand is that of stage 2"),
        ("K0.0 B1.0", "boundary 1|nothing is kept"),
        ("B0.0", "nothing is kept"),
        ("K0.0 F0", "boundary 1 is already there"),
        ("F0 F1 F2", "stage must be 0 to 1"),
        ("K0.0 K0-1.0", "already kept"),
        ("K0.1", "has 1 options"),
        ("K0-2.0", "has 0 options"),
        ("F0 F1 K2.0 B2.0 K2.0", "boundary 2 is not there|the gradient|ends before"),
        ("K0.0 K1.0 K2.0 B2.0 B1.0 B0.0 K0.0", "still kept"),
    ],
)
def test_replay_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(CHAIN, sequence(text))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("saved_bytes", -1),
        ("saved_bytes", 1.5),
        ("forward_ms", math.inf),
        ("backward_ms", -1.0),
        ("backward_ms", math.nan),
        ("forward_ms", "1"),
        ("backward_ms", None),
        ("saved_bytes", "5"),
        ("backward_peak_bytes", 2**62 + 1),
    ],
)
def test_option_refuses(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}; it must be "):
        replace(OPTION, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("forward_ms", "1"), ("input_bytes", 2**63), ("input_bytes", None)]
)
def test_stage_refuses(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}; it must be "):
        replace(STAGE, **{field: value})


def test_chain_whose_sizes_add_up_to_more_than_the_limit_refuses() -> None:
    stage = replace(STAGE, parameter_gradient_bytes=2**61)
    spans = dict(CHAIN.spans)
    Chain(stages=(stage, STAGE, STAGE), spans=spans)
    with pytest.raises(
        ValueError,
        match=r"the sum of the chain's sizes is \d+; it must be at most 2\*\*62, .* larger unit",
    ):
        Chain(stages=(stage, stage, STAGE), spans=spans)


def test_chain_refuses() -> None:
    spans = dict(CHAIN.spans)
    with pytest.raises(
        ValueError, match="saved_bytes is 7; it must be at most forward_peak_bytes, 6"
    ):
        replace(OPTION, saved_bytes=7)
    with pytest.raises(ValueError, match="0 stages"):
        Chain(stages=(), spans={})
    with pytest.raises(ValueError, match="stage 1 has no options"):
        Chain(stages=CHAIN.stages, spans={(0, 0): (OPTION,), (2, 2): (OPTION,)})
    with pytest.raises(ValueError, match=r"span \(1, 3\) is no span of the stages 0 to 2"):
        Chain(stages=CHAIN.stages, spans=spans | {(1, 3): (OPTION,)})
    with pytest.raises(ValueError, match=r"span \(1, 2\) has 0 options"):
        Chain(stages=CHAIN.stages, spans=spans | {(1, 2): ()})
    with pytest.raises(
        ValueError, match=r"saved_bytes of option 0 of span \(1, 1\) is 2; .* output, 3"
    ):
        Chain(stages=CHAIN.stages, spans=spans | {(1, 1): (replace(OPTION, saved_bytes=2),)})
    with pytest.raises(ValueError, match=r"forward_peak_bytes of stage 0 is 2; .* output, 3"):
        Chain(stages=(replace(STAGE, forward_peak_bytes=2), STAGE, STAGE), spans=spans)


def test_infeasible_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(InfeasibleBudgetError(3, 8)))
    assert (error.budget_bytes, error.minimum_bytes) == (3, 8)
    assert isinstance(error, ValueError)


def test_example_of_the_package_runs() -> None:
    assert doctest.testmod(rotor).failed == 0
