"""x"""
from __future__ import annotations
from dataclasses import dataclass
from rockmate.bound.protocol import Bounds


@dataclass(frozen=True)
class MovedBound:
    inner: Bounds

    def bound_ms(self, budget_bytes: int) -> float:
        return 0.0

    tight_bound_ms = bound_ms
