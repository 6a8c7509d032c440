"""Which clock times frames."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from rockmate.frames.recorder import clock_of, logical_clock


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
def test_other_work_does_not_count_on_one_thread_of_a_cpu() -> None:
    torch.set_num_threads(1)
    clock = clock_of(torch.device("cpu"))
    begin = clock()
    time.sleep(0.2)  # as a thread that waits for the processor
    assert clock() - begin < 0.1


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(("kind", "threads"), [("cuda", 1), ("cuda", 2), ("cpu", 2)])
def test_elsewhere_waiting_counts(kind: str, threads: int) -> None:
    torch.set_num_threads(threads)
    clock = clock_of(torch.device(kind))
    begin = clock()
    time.sleep(0.02)
    assert clock() - begin >= 0.02


def test_the_logical_clock_is_the_same_on_all_ranks() -> None:
    one, other = logical_clock(), logical_clock()
    assert [one() for _ in range(5)] == [other() for _ in range(5)]
