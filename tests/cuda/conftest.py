"""The tests for a GPU. `REHEARSE_ON=cpu` runs on the CPU those that need nothing of CUDA."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    rehearsed = os.environ.get("REHEARSE_ON")
    if rehearsed:
        return torch.device(rehearsed)
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)
