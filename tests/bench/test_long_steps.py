"""Plans of long steps beside their bound: budgets that nothing fits are left out."""

from __future__ import annotations

import pytest

from bench.long_steps import Long, measure, page, rows


@pytest.mark.parametrize("name", ["gpt2-96", "qwen3-30b-a3b"])
def test_gaps_of_feasible_budgets(name: str) -> None:
    found = measure(name, (0.9, 0.5, 0.01), tiny=True)
    assert 0.01 not in found.gaps
    assert all(share >= found.smallest_share for share in found.gaps)
    assert all(0 <= gap < 1 for gap in found.gaps.values())


def test_a_page_of_two_models() -> None:
    found = [
        Long("one", 2_000, 0.2, {0.9: 0.0, 0.5: 0.02}, 1.0),
        Long("other", 3_000, 0.95, {}, 0.0),
    ]
    first, second = rows(found)
    assert first[:4] == ("one", "2,000", "0.200", "0.00%")
    assert set(second[3:-1]) == {"-"}
    machine = {"command": "python -m bench.long_steps", "commit": "abc", "load_average": 0.0}
    known = dict.fromkeys(("machine", "processor", "python", "torch", "transformers"), "1")
    text = page(found, {**machine, **known, "num_cores": 2, "num_threads": 1, "gpu": None})
    assert "**1 of 2 plans are within 1% of the lower bound**" in text
