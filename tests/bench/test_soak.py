"""Random shapes: few captures, and no growth."""

from __future__ import annotations

from bench import soak


def test_random_shapes_need_few_captures_and_little_memory() -> None:
    rows = list(soak.soak(300, 0.7))
    assert rows[-1]["steps"] == 300
    # One for the sample's dims, one for a single row: fixed and symbolic. None after that.
    assert rows[-1]["captures"] <= 5
    assert rows[-1]["captures"] == rows[len(rows) // 2]["captures"]
    # The code and the layouts of 64 shapes, and the captures.
    assert rows[-1]["growth_mb"] < 50
