"""The clock by which frames, their parts and their ops are timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

_TICK_S = 1e-4
"""What a tick of the logical clock stands for."""


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds. On one thread of a CPU its own, which other work on the machine does not drive.

    Args:
        device: of the model.
    """
    is_own = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_own else time.perf_counter


def logical_clock() -> Callable[[], float]:
    """A clock that goes on by a tick whenever it is read: at saved tensors and calls."""
    ticks = itertools.count()
    return lambda: next(ticks) * _TICK_S
