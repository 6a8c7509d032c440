"""Time and memory of the solver on chains of real length."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from stopwatch import least_seconds

from rotor import Chain, Option, Stage, replay, solve_table

MIB = 2**20


def model_like(num_stages: int, lengths: tuple[int, ...], num_options: int) -> tuple[Chain, int]:
    """A chain that trades bytes for time in each span, and the bytes that saving all takes."""
    rng = random.Random(0)
    x = [rng.randint(1, 20 * MIB) for _ in range(num_stages + 1)]
    forward = [rng.uniform(0.5, 2.0) for _ in range(num_stages)]
    inner = [rng.randint(40 * MIB, 160 * MIB) for _ in range(num_stages)]
    stages = tuple(
        Stage(
            input_bytes=x[s],
            output_gradient_bytes=x[s + 1],
            forward_ms=forward[s],
            forward_peak_bytes=2 * x[s + 1],
        )
        for s in range(num_stages)
    )
    spans = {}
    for first, length in ((s, k) for k in lengths for s in range(num_stages - k + 1)):
        end = first + length
        span_ms, span_bytes = sum(forward[first:end]), sum(inner[first:end])
        spans[first, end - 1] = tuple(
            Option(
                saved_bytes=(saved := x[end] + span_bytes * i // (num_options - 1)),
                forward_peak_bytes=saved + 10 * MIB,
                backward_peak_bytes=span_bytes + 2 * x[end] + x[first],
                forward_ms=span_ms,
                backward_ms=2 * span_ms + span_ms * (1 - i / (num_options - 1)) ** 1.5,
            )
            for i in range(num_options)
        )
    return Chain(stages=stages, spans=spans), sum(inner)


@pytest.mark.parametrize(
    ("num_stages", "lengths", "num_options", "num_slots", "limit_s"),
    # About twice what a quiet machine takes: with others on both cores processor time nearly
    # doubles.
    [(50, (1,), 8, 500, 0.6), (200, (1,), 8, 500, 10.0), (96, (1, 2, 4), 12, 1000, 8.0)],
)
def test_solves_in_time(
    num_stages: int, lengths: tuple[int, ...], num_options: int, num_slots: int, limit_s: float
) -> None:
    chain, all_bytes = model_like(num_stages, lengths, num_options)
    table = None

    def run() -> None:
        nonlocal table
        table = solve_table(chain, all_bytes // 2, num_slots)

    assert least_seconds(run, run, run) < limit_s
    assert table is not None
    for budget in (table.minimum_bytes, all_bytes // 4, all_bytes // 2):
        result = replay(chain, table.sequence(budget))
        assert result.peak_bytes <= budget
        assert result.time_ms == pytest.approx(table.time_ms(budget), rel=1e-9)


def test_memory_is_what_the_docstring_says() -> None:
    # n (n + 1) / 2 entries of 34 bytes a slot, and what is worked on at once. At 200 stages and 500
    # slots: 0.4 GiB.
    chain, all_bytes = model_like(50, (1,), 3)
    tracemalloc.start()
    solve_table(chain, all_bytes // 2, 500)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 34 * (50 * 51 // 2) * 512 + 4 * MIB
