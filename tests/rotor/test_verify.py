"""What a chain and a sequence accept and refuse, and what the replay counts."""

from __future__ import annotations

import doctest
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
from rotor_replay import replay

import rotor
from rotor import (
    Backward,
    Chain,
    ForwardKeep,
    ForwardOnly,
    InfeasibleBudgetError,
    Sequence,
    Stage,
)

STAGE = Stage(
    input_bytes=3,
    output_gradient_bytes=2,
    forward_ms=1.0,
    forward_peak_bytes=4,
    saved_bytes=5,
    keep_peak_bytes=6,
    backward_ms=2.0,
    backward_peak_bytes=9,
)
CHAIN = Chain(stages=(STAGE,) * 3)


def sequence(text: str) -> Sequence:
    """Read the text form back."""
    kinds = {"F": ForwardOnly, "K": ForwardKeep, "B": Backward}
    return Sequence(tuple(kinds[word[0]](int(word[1:])) for word in text.split()))


@pytest.mark.parametrize(
    ("text", "peak_bytes", "time_ms"),
    [
        # Held by the backward of stage 2: what two stages saved, and its own peak.
        ("K0 K1 K2 B2 B1 B0", 5 + 5 + 9, 9.0),
        # The backward of stage 2 beside x_2.
        ("F0 F1 K2 B2 F0 K1 B1 K0 B0", 3 + 9, 12.0),
        # x_1 is held from the first forward to the backward of stage 1, so x_2 comes on top of it.
        ("F0 F1 K2 B2 K1 B1 K0 B0", 3 + 3 + 9, 11.0),
    ],
)
def test_replay_counts_by_hand(text: str, peak_bytes: int, time_ms: float) -> None:
    steps = sequence(text)
    assert str(steps) == text
    result = replay(CHAIN, steps)
    assert (result.peak_bytes, result.time_ms) == (peak_bytes, time_ms)


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
        ("input_bytes", 2**63),
        ("input_bytes", None),
    ],
)
def test_stage_refuses(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}; it must be "):
        replace(STAGE, **{field: value})


def test_chain_whose_sizes_add_up_to_more_than_the_limit_refuses() -> None:
    stage = replace(STAGE, saved_bytes=2**60, keep_peak_bytes=2**61)
    Chain(stages=(stage, STAGE, STAGE))
    with pytest.raises(
        ValueError,
        match=r"the sum of the chain's sizes is \d+; it must be at most 2\*\*62, .* larger unit",
    ):
        Chain(stages=(stage, stage, stage))


def test_chain_refuses() -> None:
    with pytest.raises(ValueError, match="saved_bytes is 7; it must be at most keep_peak_bytes, 6"):
        replace(STAGE, saved_bytes=7)
    with pytest.raises(ValueError, match="0 stages"):
        Chain(stages=())
    with pytest.raises(ValueError, match=r"saved_bytes of stage 1 is 2; .* output, 3"):
        Chain(stages=(STAGE, replace(STAGE, saved_bytes=2), STAGE))
    with pytest.raises(ValueError, match=r"forward_peak_bytes of stage 0 is 2; .* output, 3"):
        Chain(stages=(replace(STAGE, forward_peak_bytes=2), STAGE, STAGE))


def test_infeasible_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(InfeasibleBudgetError(3, 8)))
    assert (error.budget_bytes, error.minimum_bytes) == (3, 8)
    assert isinstance(error, ValueError)


def test_example_of_the_package_runs() -> None:
    assert doctest.testmod(rotor).failed == 0
