"""Tests of kernels need a compiler; those of groups do not."""

from __future__ import annotations

import pytest

from rockmate._torch.inductor import missing_compiler


@pytest.fixture(autouse=True)
def _compiler(request: pytest.FixtureRequest) -> None:
    if request.path.name != "test_groups.py" and (missing := missing_compiler("cpu")):
        pytest.skip(f"needs {missing}")
