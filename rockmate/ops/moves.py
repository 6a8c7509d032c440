"""Calls in emitted code that move a value to another memory tier and bring it back.

Each is an event of a move (`rockmate.schedule.move`). `moves` is the one call's `StepMoves`, which
knows the tier.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Moves(Protocol):
    """What carries out the moves of one step."""

    def send(self, value: torch.Tensor, index: int) -> None:
        """Begins to copy a value out."""
        ...

    def sent(self, index: int) -> None:
        """Waits until the copy out has ended."""
        ...

    def fetch(self, index: int) -> torch.Tensor:
        """Begins to copy a value back; the result is not to be read yet."""
        ...

    def fetched(self, index: int) -> None:
        """Waits until the copy back has ended."""
        ...


def send(moves: Moves, value: torch.Tensor, index: int) -> None:
    """Begins to copy a value out."""
    moves.send(value, index)


def sent(moves: Moves, value: torch.Tensor, index: int) -> None:
    """Waits until the copy out has ended. It takes the value, whose last use it is."""
    del value
    moves.sent(index)


def fetch(moves: Moves, index: int) -> torch.Tensor:
    """Begins to copy a value back; the result is not to be read yet."""
    return moves.fetch(index)


def fetched(moves: Moves, value: torch.Tensor, index: int) -> torch.Tensor:
    """Waits until the copy back has ended, and returns the value, which may now be read."""
    moves.fetched(index)
    return value
