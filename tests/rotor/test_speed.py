"""Time of the solver on chains of real length."""

from __future__ import annotations

import random

import pytest
from rotor_replay import replay
from stopwatch import least_seconds

from rotor import Chain, Stage, Table

MIB = 2**20


def model_like(num_stages: int) -> tuple[Chain, int]:
    """A chain that trades bytes for time, and the bytes that saving all takes."""
    rng = random.Random(0)
    x = [rng.randint(1, 20 * MIB) for _ in range(num_stages + 1)]
    inner = [rng.randint(40 * MIB, 160 * MIB) for _ in range(num_stages)]
    stages = tuple(
        Stage(
            input_bytes=x[s],
            output_gradient_bytes=x[s + 1],
            forward_ms=(forward_ms := rng.uniform(0.5, 2.0)),
            forward_peak_bytes=2 * x[s + 1],
            saved_bytes=x[s + 1] + inner[s],
            keep_peak_bytes=x[s + 1] + inner[s] + 10 * MIB,
            backward_ms=2 * forward_ms,
            backward_peak_bytes=inner[s] + 2 * x[s + 1] + x[s],
        )
        for s in range(num_stages)
    )
    return tuple(stages), sum(inner)


@pytest.mark.parametrize(
    ("num_stages", "num_slots", "limit_s"),
    # About twice what a quiet machine takes: with others on both cores processor time nearly
    # doubles.
    [(50, 500, 1.0), (200, 200, 10.0)],
)
def test_solves_in_time(num_stages: int, num_slots: int, limit_s: float) -> None:
    chain, all_bytes = model_like(num_stages)
    table = None

    def run() -> None:
        nonlocal table
        table = Table(chain, all_bytes // 2, num_slots)

    assert least_seconds(run, run, run) < limit_s
    assert table is not None
    for budget in (table.minimum_bytes, all_bytes // 4, all_bytes // 2):
        result = replay(chain, table.sequence(budget))
        assert result.peak_bytes <= budget
        assert result.time_ms == pytest.approx(table.time_ms(budget), rel=1e-9)
