"""The page of steps that are functions: each, tiny, has eager's bits."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bench.machine import machine_record
from bench.steps import CASES, measured, page


@pytest.mark.parametrize("name", CASES)
def test_a_tiny_step(name: str) -> None:
    (found,) = measured(name, Namespace(tiny=True, rounds=1))
    assert found["is_same"]
    assert found["least_bytes"] <= found["eager_bytes"]
    lines = page([machine_record("bench.steps") | found])
    (row,) = (line for line in lines if line.startswith(f"| {name} |"))
    assert "| yes |" in row
