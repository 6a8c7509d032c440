"""Each test begins with nothing compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from dynamo_networks import register


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    gc.collect()  # graphs that earlier tests have left and not run
    register()
    yield
    torch.compiler.reset()
