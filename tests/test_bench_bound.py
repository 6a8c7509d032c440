"""The bound is below the plan, and falls as the budget grows."""

from __future__ import annotations

import re

import pytest

from bench import bound


def test_bound_is_below_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    bound.main(["--model", "gpt2", "--tiny", "--budget", "200000", "--budget", "300000"])
    rows = [re.search(r"bound ([\d.]+)x, plan ([\d.]+)x", line) for line in capsys.readouterr().out.splitlines()]
    pairs = [(float(row[1]), float(row[2])) for row in rows if row]
    assert len(pairs) == 2
    assert all(1.0 <= lower <= plan for lower, plan in pairs)
    assert pairs[0][0] >= pairs[1][0]
