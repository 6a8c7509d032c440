"""Errors of `fit`."""

from __future__ import annotations

from rockmate.errors import RockmateError


class FitError(RockmateError, ValueError):
    """What is asked for cannot be told; the text says what to change."""


class NothingFitsError(FitError):
    """Not even the smallest size fits the memory.

    Attributes:
        memory_bytes: the memory.
        least_bytes: what the smallest size takes at least.
    """

    def __init__(self, text: str, *, memory_bytes: int, least_bytes: int) -> None:
        super().__init__(text)
        self.memory_bytes = memory_bytes
        self.least_bytes = least_bytes
