"""What frames say of themselves: lines and a table."""

from __future__ import annotations

import re

from rockmate import RockmateModule
from tests.frames.test_frames import Chain, framed, loss_of, peak_of


def trained(budget: float) -> RockmateModule:
    module = framed(Chain(num_blocks=8), budget)
    for step in range(6):
        loss_of(module, step, 512).backward()
    return module


def test_nothing_is_said_before_the_first_step() -> None:
    module = framed(Chain())
    assert module.frames is not None
    assert module.frames.report() is None
    assert module.frames.summary() == "frames of 6 submodules, not measured yet"
    assert "(frames of 6 submodules, not measured yet)" in repr(module)


def test_the_report_agrees_with_what_happened() -> None:
    module = trained(0.4)
    assert module.frames is not None
    report = module.frames.report()
    assert report is not None
    assert report.minimum_bytes < report.budget_bytes < report.baseline_bytes
    counts = report.counts
    words = [row.dropped for row in report.rows]
    assert len(words) == counts.num_frames == 8
    assert sum(each.startswith("nothing") for each in words) == 8 - counts.num_dropped
    assert words.count("nothing, without hooks") == counts.num_kept
    assert report.bound_s is not None
    assert report.decided_s is not None
    assert 0 < report.bound_s <= report.decided_s + 1e-9
    summary, table = report.summary(), report.table()
    for title in ("activation budget", "predicted peak", "smallest peak", "recomputed", "lower"):
        assert len(re.findall(f"^{title} ", summary, re.MULTILINE)) == 1
    assert len(table.splitlines()) == 9
    assert all(f"blocks.{index} " in table for index in range(8))


def test_the_predicted_peak_is_the_measured_one() -> None:
    module = trained(0.5)
    measured = peak_of(module, module, 512)
    assert module.frames is not None
    report = module.frames.report()
    assert report is not None
    # Each part that can run again takes 5 KB of random state, which is not counted.
    assert measured / 1.01 <= report.peak_bytes <= 1.05 * measured
