"""Stands in for the package of this name, whose metrics are downloaded."""

from __future__ import annotations

from typing import Any


class _Accuracy:
    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._pairs += zip(list(predictions), list(references), strict=True)

    def compute(self, predictions: Any = (), references: Any = (), **_: Any) -> dict[str, float]:
        pairs = [*self._pairs, *zip(list(predictions), list(references), strict=True)]
        self._pairs = []
        return {"accuracy": sum(bool(a == b) for a, b in pairs) / max(1, len(pairs))}


def load(*_: Any, **__: Any) -> _Accuracy:
    """A metric."""
    return _Accuracy()
