"""Random training scripts: a planned run is eager's, or is refused by name.

    RANDOM_SCRIPTS=1000 python -m pytest -n 2 tests/entry/test_random_scripts.py

The number of a case is its seed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import random_scripts
from random_scripts import Case, Model
from torch import nn

from rockmate import RockmateError, RockmateModule

NUM_CASES, NUM_QUICK = int(os.environ.get("RANDOM_SCRIPTS", "30")), 10
SEEDS = [
    pytest.param(seed, marks=pytest.mark.slow if seed >= NUM_QUICK else ())
    for seed in range(NUM_CASES)
]
pytestmark = pytest.mark.filterwarnings("ignore")  # of hooks and schedulers in the scripts


@pytest.mark.parametrize("seed", SEEDS)
def test_a_planned_run_is_eagers(seed: int) -> None:
    case = Case.of(seed)

    def wrap(model: Model, inputs: dict[str, Any]) -> nn.Module:
        return RockmateModule(model, inputs, case.budget, on_infeasible="least", machine="cpu-avx2")

    try:
        theirs = random_scripts.run(case)
    except RuntimeError as error:
        pytest.skip(f"eager refuses it: {str(error)[:60]}")
    try:
        ours = random_scripts.run(case, wrap)
    except RockmateError as error:
        pytest.skip(f"refused: {str(error)[:80]}")
    assert not random_scripts.difference(case, ours, theirs), case
