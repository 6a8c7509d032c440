"""Copies take next to no time, so that values move."""

from __future__ import annotations

import moves
import pytest


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    moves.use_fast_link(monkeypatch)
