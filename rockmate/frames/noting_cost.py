"""What it costs to have the ops of a forward noted."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from rockmate._torch.storage import storage_id, version_of
from rockmate.frames.saved import Saved
from rockmate.frames.slots import Slot, Slots, checked
from rockmate.frames.storages import HeldStorages
from rockmate.frames.tape import Recipe, Tape
from rockmate.state.tensors import storages_of

_NUM_ROUNDS = 6
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
        repeated_s: of one that runs again.
    """

    seen_s: float
    noted_s: float
    begun_s: float
    by_tape_s: float = 0.0
    hook_s: float = 0.0
    repeated_s: float = 0.0

    @property
    def unseen_s(self) -> float:
        """Of an op that is noted, as far as the tape cannot see it: the way to the tape."""
        return max(0.0, self.seen_s + self.noted_s - self.by_tape_s)

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
    ops = _timed_tape().ops
    recipes = None, Recipe(ops, frozenset()), Recipe(ops, frozenset(range(len(ops))))
    rounds, by_tape = [], []
    for _ in range(_NUM_ROUNDS):  # in turn: a machine is busier at one time than at another
        rounds.append([_seconds(_tape(each) if each is not None else None) for each in recipes])
        timed = _timed_tape()
        by_tape.append(timed.noting_s / timed.num_ops)
    plain_s, seen_s, noted_s = (
        sum(map(min, zip(*kind, strict=True))) / len(ops) for kind in zip(*rounds, strict=True)
    )
    begun_s = min(_begun_s() for _ in range(_NUM_ROUNDS))
    num_pairs = _NUM_REPEATS * _NUM_ROUNDS
    pairs = [(_saving_s(), _saving_s(has_hooks=True)) for _ in range(num_pairs)]
    unhooked_s, hooked_s = map(min, zip(*pairs, strict=True))
    again = [_again_s() for _ in range(num_pairs)]
    run_s, repeated_s = map(min, zip(*again, strict=True))
    return NotingCost(
        seen_s=max(0.0, seen_s - plain_s),
        noted_s=max(0.0, noted_s - seen_s),
        begun_s=begun_s,
        by_tape_s=min(by_tape),
        hook_s=max(0.0, hooked_s - unhooked_s),
        repeated_s=max(0.0, repeated_s - run_s),
    )


def _tape(recipe: Recipe | None = None) -> Tape:
    return Tape("", (), time.thread_time, recipe)


def _timed_tape() -> Tape:
    """A tape that has noted the ops, and what that took."""
    tape = _tape()
    _ = _seconds(tape)
    return tape


def _saving_s(*, has_hooks: bool = False) -> float:
    """Of an op that saves a tensor, and its backward, which reads and then releases it."""

    def pack(tensor: torch.Tensor) -> Slot:
        return Slot(slots, slots.add(tensor, storages_of(tensor), version_of(tensor)))

    def unpack(slot: Slot) -> torch.Tensor:
        saved = slots.found(slot.index)
        assert isinstance(saved, Saved)
        return checked(saved, "")

    slots, x = Slots(HeldStorages()), torch.zeros(1, requires_grad=True)
    fill_caches()
    with torch.enable_grad(), saved_tensors_hooks(pack, unpack) if has_hooks else nullcontext():
        begin = time.thread_time()
        result = x.exp()
        seconds = time.thread_time() - begin
    fill_caches()
    begin = time.thread_time()
    _ = torch.autograd.grad(result, x)
    return seconds + time.thread_time() - begin


def _again_s() -> tuple[float, float]:
    """Of an op that runs, and of one that a tape has run again."""
    x = torch.zeros(1)
    tape = Tape("", (storage_id(x),), time.thread_time)
    with tape.observing():
        _ = x.exp()
    (made,) = tape.states_of_ops[0].outputs
    seconds = []
    for run in (x.exp, lambda: tape.make({made}, {})):
        fill_caches()
        begin = time.thread_time()
        _ = run()
        seconds.append(time.thread_time() - begin)
    return seconds[0], seconds[1]


def _begun_s() -> float:
    """Of a call in which no op is seen."""
    tape = _tape()
    fill_caches()
    begin = time.thread_time()
    with tape.observing():
        pass
    return time.thread_time() - begin


def _seconds(tape: Tape | None) -> list[float]:
    """Of each of some ops on one element, a few times over."""
    x, bias = torch.zeros(1, 1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    weight = torch.zeros(1, 1, requires_grad=True)
    calls = (
        lambda: functional.linear(x, weight, bias),
        lambda: functional.gelu(x),
        lambda: x + x,
    )
    seconds = []
    for call in calls * _NUM_REPEATS:
        fill_caches()
        with torch.enable_grad(), nullcontext() if tape is None else tape.observing():
            begin = time.thread_time()
            _ = call()
            seconds.append(time.thread_time() - begin)
    return seconds


def fill_caches() -> None:
    """Writes memory, so that what follows finds nothing of its own in the caches of the core."""
    _ = torch.zeros(_FILLING_BYTES, dtype=torch.uint8)
