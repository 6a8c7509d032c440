"""Fetches of weights: their faults by name, their lines, and the time of a step by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rockmate.costs.cost import Link
from rockmate.schedule.lanes import replay
from rockmate.schedule.move import Fetch, Move, broken_fetch

# Runs 0 and 1 of the forward read weight 7, and run 3 of the backward does.
READS = ((7,), (7, 2), (2,), (7,))
FORWARD = Fetch(storage=7, fetch=0, fetched=0, last=1)
BACKWARD = Fetch(storage=7, fetch=2, fetched=3, last=3)
LINK = Link(out_gb_per_s=1e-6, in_gb_per_s=1e-6, latency_ms=0.0)  # a byte takes a millisecond


def test_two_fetches_serve_all_reads() -> None:
    assert not broken_fetch([BACKWARD, FORWARD], READS, 2)
    assert not broken_fetch([replace(FORWARD, last=3)], READS, 2)


@pytest.mark.parametrize(
    ("fetches", "fault"),
    [
        ([FORWARD], "step 3 reads storage 7, which is not in memory"),
        ([replace(FORWARD, fetched=1), BACKWARD], "step 0 reads storage 7"),
        ([FORWARD, replace(BACKWARD, fetch=1)], "awaited in the other half"),
        ([replace(FORWARD, last=3), BACKWARD], "begins while the weight is in memory"),
        ([FORWARD, replace(BACKWARD, fetched=4)], "does not end behind its begin"),
        ([replace(FORWARD, last=2), replace(BACKWARD, fetch=3)], "outlives its last read"),
    ],
)
def test_faults_are_named(fetches: list[Fetch], fault: str) -> None:
    assert fault in broken_fetch(fetches, READS, 2)


@pytest.mark.parametrize(
    ("num_bytes", "waited"), [((5, 5), 5), ((5, 12), 7), ((5, 10), 5), ((12, 25), 12 + 15)]
)
def test_the_step_waits_for_what_compute_does_not_hide(
    num_bytes: tuple[int, int], waited: float
) -> None:
    """Runs of 10 ms: the first copy has nothing beside it, the second one run."""
    found = replay([10.0] * 4, [FORWARD, BACKWARD], num_bytes, LINK)
    assert found.fetched_waits_ms[0] == num_bytes[0]
    assert found.waited_ms == pytest.approx(waited)
    assert found.time_ms == pytest.approx(40 + waited)


def test_moves_and_fetches_share_the_lane_back() -> None:
    move = Move(storage=2, send=1, sent=2, fetch=2, fetched=3)
    found = replay([10.0] * 4, [move, BACKWARD], (6, 6), LINK)
    # Both come back in the run of 10 ms, one behind the other.
    assert found.fetched_waits_ms == (0.0, pytest.approx(2.0))
