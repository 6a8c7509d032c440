"""Time and memory of the solver on chains of real length."""

from __future__ import annotations

import tracemalloc

import pytest
from stopwatch import least_seconds

from bench.rotor_time import model_like
from rotor import replay, solve_table

MIB = 2**20


@pytest.mark.parametrize(
    ("num_stages", "lengths", "num_options", "num_slots", "limit_s"),
    # Of the first two, twice the targets of bench/rotor_time.py, 0.3 and 5 s: with others on both
    # cores processor time nearly doubles. The third has no target: about twice what a quiet machine
    # takes.
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
