"""What it costs to have the ops of a forward noted."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from rockmate._torch.storage import version_of
from rockmate.frames.saved import Saved
from rockmate.frames.slots import Slot, Slots, checked
from rockmate.frames.storages import HeldStorages, storages_of
from rockmate.frames.tape import Recipe, Tape

_NUM_ROUNDS = 4
_NUM_REPEATS = 3
_FILLING_BYTES = 16 << 20
"""More than the caches of one core."""


class NotingCost(NamedTuple):
    """Seconds that noting adds to an op.

    Attributes:
        seen_s: of an op that is compared with a recipe's.
        noted_s: of one that is noted, beside those.
        begun_s: of a call in which ops begin to be seen.
        by_tape_s: of one that is noted, as far as the tape itself can see it.
        hook_s: of a tensor that is saved, read and released.
    """

    seen_s: float
    noted_s: float
    begun_s: float
    by_tape_s: float = 0.0
    hook_s: float = 0.0

    def as_in_step(self, by_tape_s: float) -> NotingCost:
        """The cost within a step, where not only data are cold, but what predicts branches, too.

        Args:
            by_tape_s: of an op that is noted, as the tape of a step has seen it; 0 if unknown.
        """
        if not self.by_tape_s or not by_tape_s:
            return self
        colder = max(1.0, by_tape_s / self.by_tape_s)
        return NotingCost(*(colder * each for each in self))


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
    unhooked_s, hooked_s = (
        min(_saving_s(has_hooks=has_hooks) for _ in range(_NUM_ROUNDS))
        for has_hooks in (False, True)
    )
    noting_s = min(_by_tape_s() for _ in range(_NUM_ROUNDS))
    return NotingCost(
        max(0.0, seen_s - plain_s), max(0.0, noted_s - seen_s), begun_s, noting_s,
        max(0.0, hooked_s - unhooked_s),
    )  # fmt: skip


def _by_tape_s() -> float:
    """Of an op that is noted, by the tape's own account."""
    tape = Tape("", (), time.thread_time)
    _ = _seconds(tape)
    return tape.noting_s / tape.num_ops


def _saving_s(*, has_hooks: bool) -> float:
    """Of an op that saves a tensor, and its backward, which reads and then releases it."""

    def pack(tensor: torch.Tensor) -> Slot:
        return Slot(slots, slots.add(tensor, storages_of(tensor), version_of(tensor)))

    def unpack(slot: Slot) -> torch.Tensor:
        saved = slots.found(slot.index)
        assert isinstance(saved, Saved)
        return checked(saved, "")

    slots, x = Slots(HeldStorages()), torch.zeros(1, requires_grad=True)
    least_s = math.inf
    for _ in range(_NUM_REPEATS):
        fill_caches()
        with torch.enable_grad(), saved_tensors_hooks(pack, unpack) if has_hooks else nullcontext():
            begin = time.thread_time()
            result = x.exp()
            seconds = time.thread_time() - begin
        fill_caches()
        begin = time.thread_time()
        _ = torch.autograd.grad(result, x)
        least_s = min(least_s, seconds + time.thread_time() - begin)
    return least_s


def _begun_s() -> float:
    """Of a call in which no op is seen."""
    tape = Tape("", (), time.thread_time)
    fill_caches()
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
            fill_caches()
            with torch.enable_grad(), nullcontext() if tape is None else tape.observing():
                begin = time.thread_time()
                _ = call()
                seconds += time.thread_time() - begin
    return seconds


def fill_caches() -> None:
    """Writes memory, so that what follows finds nothing of its own in the caches of the core."""
    _ = torch.zeros(_FILLING_BYTES, dtype=torch.uint8)
