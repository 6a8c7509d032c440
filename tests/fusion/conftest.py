"""Tests of kernels need a compiler; those of groups do not."""

from __future__ import annotations

import pytest

from rockmate._torch.inductor import missing_compiler


@pytest.fixture(autouse=True)
def _compiler(request: pytest.FixtureRequest) -> None:
    if request.path.name != "test_groups.py" and (missing := missing_compiler("cpu")):
        pytest.skip(f"needs {missing}")


@pytest.fixture(autouse=True)
def _equal_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of plans take every kernel that is right, however busy the machine is."""
    if request.path.name == "test_fused_plans.py":
        monkeypatch.setattr("rockmate.fusion.kernels.time_ms", lambda *_: 1.0)
