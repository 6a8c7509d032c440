"""What it costs to have the ops of a forward noted."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

from rockmate.frames.tape import Recipe, Tape

_NUM_ROUNDS = 4
_NUM_REPEATS = 3
_FILLING_BYTES = 16 << 20
"""More than the caches of one core."""
_COLDER = 2.5
"""In a step of a language model an op that is seen takes 16 to 25 us, and 7 to 10 here: not only
the data of a core go cold there, but also what predicts its branches."""


class NotingCost(NamedTuple):
    """Seconds that noting adds to an op.

    Attributes:
        seen_s: of an op that is compared with a recipe's.
        noted_s: of one that is noted, beside those.
        begun_s: of a call in which ops begin to be seen.
    """

    seen_s: float
    noted_s: float
    begun_s: float


@cache
def noting_cost() -> NotingCost:
    """Measured once, on the least ops, after memory that fills the caches was written before each.

    Between the kernels of a step, interpreter and dispatcher are out of the caches. In a loop of
    small ops they are not, and noting seems to take a third. Other processes only add to a time, so
    the least one counts.
    """
    first = Tape("", (), time.thread_time)
    _ = _seconds(first)
    ops = first.ops

    def least_s(recipe: Recipe | None = None, *, is_taped: bool = True) -> float:
        tapes = [Tape("", (), time.thread_time, recipe) for _ in range(_NUM_ROUNDS)]
        return min(_seconds(each if is_taped else None) for each in tapes) / len(ops)

    plain_s = least_s(is_taped=False)
    seen_s, noted_s = least_s(Recipe(ops, frozenset())), least_s()
    begun_s = min(_begun_s() for _ in range(_NUM_ROUNDS))
    found = max(0.0, seen_s - plain_s), max(0.0, noted_s - seen_s), begun_s
    return NotingCost(*(_COLDER * each for each in found))


def _begun_s() -> float:
    """Of a call in which no op is seen."""
    tape = Tape("", (), time.thread_time)
    _fill_caches()
    begin = time.thread_time()
    with tape.observing():
        pass
    return time.thread_time() - begin


def _seconds(tape: Tape | None) -> float:
    """Of some ops on one element each."""
    x, bias = torch.zeros(1, 1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    weight = torch.zeros(1, 1, requires_grad=True)
    calls = (
        lambda: functional.linear(x, weight, bias),
        lambda: functional.gelu(x),
        lambda: x + x,
    )
    seconds = 0.0
    for _ in range(_NUM_REPEATS):
        for call in calls:
            _fill_caches()
            with torch.enable_grad(), nullcontext() if tape is None else tape.observing():
                begin = time.thread_time()
                _ = call()
                seconds += time.thread_time() - begin
    return seconds


def _fill_caches() -> None:
    _ = torch.zeros(_FILLING_BYTES, dtype=torch.uint8)
