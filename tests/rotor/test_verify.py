"""What the replay of a sequence counts."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from rotor_replay import replay

import rotor
from rotor import Sequence, Stage, Step

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
CHAIN = (STAGE,) * 3


def sequence(text: str) -> Sequence:
    """Read the text form back."""
    kinds: dict[str, Any] = {kind: kind for kind in "FKB"}
    return tuple(Step(kinds[word[0]], int(word[1:])) for word in text.split())


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
    assert " ".join(map(str, steps)) == text
    result = replay(CHAIN, steps)
    assert (result.peak_bytes, result.time_ms) == (peak_bytes, time_ms)


def test_example_of_the_package_runs() -> None:
    assert doctest.testmod(rotor).failed == 0
