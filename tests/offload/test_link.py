"""The rates of a disk, as a planner measures them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rockmate.costs.cost import Link
from rockmate.offload.disk_tier import CHUNK_BYTES, DiskTier
from rockmate.offload.link import measure_disk_link

PAUSE_S = 0.01


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def link_with(
    pause: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch, *, cores: int
) -> Link:
    """The link of a disk whose writes take a pause longer."""
    write = os.pwritev

    def slow(*args: object) -> int:
        pause()
        return write(*args)  # pyright: ignore

    monkeypatch.setattr(os, "pwritev", slow)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    return measure_disk_link(DiskTier(str(folder)))


def busy() -> None:
    end = time.thread_time() + PAUSE_S
    while time.thread_time() < end:
        pass


def test_a_slow_disk_has_a_low_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = link_with(lambda: time.sleep(PAUSE_S), tmp_path, monkeypatch, cores=2)
    assert 0 < link.out_gb_per_s <= CHUNK_BYTES / PAUSE_S / 1e9
    assert link.in_gb_per_s > 0
    assert link.latency_ms >= 1e3 * PAUSE_S
    assert link.has_one_lane
    assert link.duplex == 1.0
    assert link.slowdown >= 1.0
    assert not list(tmp_path.iterdir())


def test_copies_slow_ops_down_by_the_core_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = link_with(busy, tmp_path, monkeypatch, cores=1)
    monkeypatch.undo()
    spared = link_with(busy, tmp_path, monkeypatch, cores=2)
    assert shared.slowdown > 1.2 * spared.slowdown
