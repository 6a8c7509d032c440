"""Plans of long steps beside their bound: budgets that nothing fits are left out."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.long_steps import measured, page
from bench.machine import machine_record


@pytest.mark.parametrize("name", ["gpt2-96", "qwen3-30b-a3b"])
def test_gaps_of_feasible_budgets(name: str) -> None:
    (found,) = measured(name, Namespace(share=(0.9, 0.5, 0.01), tiny=True))
    assert "0.01" not in found["gaps"]
    assert all(float(share) >= found["smallest_share"] for share in found["gaps"])
    assert all(0 <= gap < 1 for gap in found["gaps"].values())


def test_a_page_of_two_models() -> None:
    head = machine_record("bench.long_steps") | {"smallest_share": 0.2, "plan_s": 1.0}
    one = head | {"model": "one", "num_ops": 2_000, "gaps": {"0.9": 0.0, "0.5": 0.02}}
    other = head | {"model": "other", "num_ops": 3_000, "gaps": {}}
    lines = page([one, other])
    first, second = (line for line in lines if line.startswith(("| one", "| other")))
    assert first.startswith("| one | 2,000 | 0.200 | 0.00% | - |")
    assert second.count(" - ") == 8
    assert "**1 of 2 plans are within 1% of the lower bound**" in "\n".join(lines)
