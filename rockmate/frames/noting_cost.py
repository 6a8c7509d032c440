"""What it costs to have the ops of a forward noted."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import cache
from statistics import median
from typing import NamedTuple

import torch
from torch.nn import functional

from rockmate.frames.tape import Recipe, Tape

_NUM_ROUNDS = 3
_NUM_REPEATS = 4
_WIDTH = 256
"""Of the matrices whose product runs before each op."""


class NotingCost(NamedTuple):
    """Seconds that noting adds to an op.

    Attributes:
        seen_s: of an op that is compared with a recipe's.
        noted_s: of one that is noted.
    """

    seen_s: float
    noted_s: float


@cache
def noting_cost() -> NotingCost:
    """Measured once, on the least ops, with a product of matrices before each.

    Between the kernels of a step, interpreter and dispatcher are out of the caches. In a loop of
    small ops they are not, and noting seems to take a third.
    """
    first = Tape("", (), time.perf_counter)
    _ = _seconds(first)
    ops = first.ops

    def usual_s(recipe: Recipe | None = None, *, is_taped: bool = True) -> float:
        tapes = [Tape("", (), time.perf_counter, recipe) for _ in range(_NUM_ROUNDS)]
        return median(_seconds(each if is_taped else None) for each in tapes) / len(ops)

    plain_s = usual_s(is_taped=False)
    seen_s, noted_s = usual_s(Recipe(ops, frozenset())), usual_s()
    return NotingCost(max(0.0, seen_s - plain_s), max(0.0, noted_s - plain_s))


def _seconds(tape: Tape | None) -> float:
    """Of some ops on one element each."""
    x, bias = torch.zeros(1, 1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    weight = torch.zeros(1, 1, requires_grad=True)
    calls = (
        lambda: functional.linear(x, weight, bias),
        lambda: functional.gelu(x),
        lambda: x + x,
    )
    left, right = torch.zeros(_WIDTH, _WIDTH), torch.zeros(_WIDTH, 4 * _WIDTH)
    seconds = 0.0
    for _ in range(_NUM_REPEATS):
        for call in calls:
            _ = torch.mm(left, right).exp_()
            with torch.enable_grad(), nullcontext() if tape is None else tape.observing():
                begin = time.perf_counter()
                _ = call()
                seconds += time.perf_counter() - begin
    return seconds
