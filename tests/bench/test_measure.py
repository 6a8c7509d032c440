"""The meters against steps whose bytes are known by construction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import measure
from rockmate.curves.measure import tensor_difference

MIB = 1 << 20
RESIDENT_PROGRAM = f"""
import torch
from bench import measure

def step():
    first = torch.ones({16 * MIB // 4})
    second = first + 1
    del first
    third = second * 2

step()
print(measure.resident_peak(step))
"""


def run_with_resident_environment(program: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | measure.RESIDENT_ENVIRONMENT,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        check=True,
        text=True,
    )
    return finished.stdout


def test_allocator_peak_is_exact_where_the_allocations_are_known() -> None:
    def step() -> None:
        first = torch.empty(1000)  # 4000 bytes
        second = torch.empty(3000)  # 16000 together
        del first
        third = torch.empty(500)  # 14000 together
        del second, third

    assert measure.allocator_peak(step) == 16000


def test_allocator_peak_counts_only_what_the_step_adds() -> None:
    older = torch.ones(5000)
    # the scalar, as tensors of 8 and 4 bytes
    assert measure.allocator_peak(lambda: older.add_(1.0)) <= 16
    assert measure.allocator_peak(lambda: older.clone()) == 20000


def test_allocator_peak_is_not_misled_by_sizes_from_an_earlier_profile() -> None:
    kept: list[torch.Tensor] = []
    assert measure.allocator_peak(lambda: kept.append(torch.empty(4000))) == 16000

    def step() -> None:
        kept.clear()
        torch.empty(1000)

    # What was there before gives nothing back: the answer may be high, never low.
    assert measure.allocator_peak(step) == 4000


def test_allocator_peak_of_a_linear_step_is_the_sum_of_its_terms() -> None:
    rows, width = 32, 64
    model = nn.Linear(width, width, bias=False)
    x, upstream = torch.ones(rows, width), torch.ones(rows, width)

    def step() -> None:
        model(x).backward(upstream)

    step()
    # The output lives as long as its `backward` runs; the weight's gradient until it is added to
    # `.grad`.
    output_bytes, weight_gradient_bytes = rows * width * 4, width * width * 4
    assert measure.allocator_peak(step) == output_bytes + weight_gradient_bytes


def test_resident_peak_agrees_with_known_allocations() -> None:
    assert int(run_with_resident_environment(RESIDENT_PROGRAM)) == pytest.approx(32 * MIB, rel=0.03)


def test_resident_peak_refuses_a_process_started_without_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    with pytest.raises(RuntimeError, match="MALLOC_MMAP_THRESHOLD_"):
        measure.resident_peak(lambda: None)


def test_time_in_turn_alternates_and_restores_the_threads() -> None:
    calls: list[str] = []
    threads = torch.get_num_threads()
    times = measure.time_in_turn(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        2,
        before=lambda: calls.append("-"),
    )
    assert "".join(calls) == "-b-a-a-b-b-a"  # the first round is not counted
    assert times["a"].ratio == 1.0
    assert times["b"].median_ms > 0
    assert torch.get_num_threads() == threads


def test_time_in_turn_refuses_no_rounds() -> None:
    with pytest.raises(ValueError, match="rounds"):
        measure.time_in_turn({}, 0)


@pytest.mark.parametrize(
    ("ours", "equal", "largest"),
    [
        ({"w": [1.0, 4.0]}, True, 0.0),
        ({"w": [1.0, 5.0]}, False, 0.25),
        ({"w": [1.0, float("nan")]}, False, float("inf")),
        ({}, False, float("inf")),
    ],
)
def test_tensor_difference(ours: dict[str, list[float]], equal: bool, largest: float) -> None:
    reference = {"w": torch.tensor([1.0, 4.0])}
    found = tensor_difference(
        {name: torch.tensor(value) for name, value in ours.items()}, reference
    )
    assert (found.equal, found.largest_relative) == (equal, largest)
