"""Errors of `sweep` and `fit`."""

from __future__ import annotations

from rockmate.errors import RockmateError


class SweepError(RockmateError, ValueError):
    """A sweep cannot run as asked, or not in this folder; the text says what to change."""


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


def check_measuring(
    error: type[RockmateError], *, measure: bool, machine: object, num_steps: int
) -> None:
    """Raises `error` for steps that cannot be measured."""
    if measure and machine is not None:
        raise error(
            f"costs are estimated for {machine!r}, which is not measured from here. Leave out "
            "measuring, or the machine."
        )
    if num_steps < 1:
        raise error(f"{num_steps} steps cannot be measured. Take at least 1.")
