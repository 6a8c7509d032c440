"""Each test begins with nothing compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import list_backends, register_backend

from rockmate.dynamo.backend import rockmate_backend


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    if "rockmate" not in list_backends():  # of an installation that is older than the entry point
        register_backend(rockmate_backend, name="rockmate")
    yield
    torch.compiler.reset()
