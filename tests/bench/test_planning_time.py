"""The page of planning times, and the models with recurrent layers that it needs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench import planning_time
from bench.machine import machine_record
from bench.models import built, makers
from bench.planning_time import Measured, Timed

RECURRENT = makers("recurrent")


def test_a_page_says_which_targets_are_hit() -> None:
    measured = Measured(1234, [Timed("a", 1.0, 1.0), Timed("b", 1.0, 1.1)])
    head = machine_record("bench.planning_time")
    found = [head | each for each in planning_time.records_of("tiny", measured)]
    page = "\n".join(planning_time.page(found))
    assert "**1 of 2 targets are hit.**" in page
    assert "| tiny | 1,234 | a | 1 | 1.00 | hit |" in page
    assert "| tiny | 1,234 | b | 1 | 1.10 | **miss** |" in page


def test_a_case_beyond_the_limit_is_a_miss() -> None:
    (record,) = planning_time.measured_apart("rwkv, 12 layers, 1,024 tokens", 1)
    page = planning_time.page([machine_record("bench.planning_time") | record])
    assert any(line.endswith("| > 1 | **miss** |") for line in page)


def test_a_second_start_of_gpt2_is_planned_within_a_second() -> None:
    first, second = planning_time.two_starts("gpt2-1row", first=3.0, second=1.0).times
    assert second.figure_s <= 1.0 < first.figure_s


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_train(name: str) -> None:
    workload = built(name, partial(RECURRENT[name], layers=3, length=8))
    loss = workload.model(**workload.sample).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in workload.model.parameters())
