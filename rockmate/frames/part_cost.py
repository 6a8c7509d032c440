"""What it costs to have a part run again, beside its ops."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import nn

from rockmate.frames.call import Arguments, Call
from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey
from rockmate.frames.noting_cost import fill_caches

_NUM_ROUNDS = 5


@cache
def part_cost_s() -> float:
    """Seconds: it takes the state before the first run, and sets it for the second.

    Measured once, on the least module, with cold caches. Other processes only add to a time, so the
    least one counts.
    """
    memory = Memory(torch.device("cpu"), lambda: None)
    return min(_seconds(memory) for _ in range(_NUM_ROUNDS))


def _seconds(memory: Memory) -> float:
    module, x = nn.ReLU(), torch.zeros(1, requires_grad=True)
    arguments = Arguments(module.forward, (x,), {})
    fill_caches()
    begin = time.thread_time()
    call = Call(FrameKey("", 0), module, arguments, memory)
    call.end()
    passed_s = time.thread_time() - begin
    fill_caches()
    begin = time.thread_time()
    with call.again():
        pass
    return passed_s + time.thread_time() - begin
