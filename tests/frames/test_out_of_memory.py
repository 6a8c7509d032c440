"""Frames within a memory limit, and in a process whose allocations fail."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from rockmate import RockmateModule
from rockmate.errors import InfeasibleMemoryLimitError
from tests.frames.test_frames import Chain, loss_of


def test_a_memory_limit_becomes_a_budget_at_the_first_call() -> None:
    model = Chain()
    module = RockmateModule(model, None, memory_limit="20GiB", optimizer="sgd", mode="frames")
    assert module.frames is not None
    for seed in range(2):
        loss_of(module, seed).backward()
    assert module.frames.budget_bytes is not None
    assert 10 << 30 < module.frames.budget_bytes < 20 << 30
    small = RockmateModule(model, None, memory_limit="1MiB", mode="frames")
    with pytest.raises(InfeasibleMemoryLimitError, match=r"1\.0 MiB"):
        loss_of(small, 0).backward()


_CAPPED = """
import copy, resource, sys, torch
from torch import nn
from rockmate import RockmateModule

torch.set_num_threads(1)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 1024), nn.Tanh(), nn.Dropout(), nn.Linear(1024, 64)
        )
    def forward(self, x):
        return x + self.layers(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
    def forward(self, x):
        for block in self.blocks:
            if torch.rand(()) < 0.9:
                x = block(x)
        return x.square().mean()

torch.manual_seed(0)
plain = Model()
model = copy.deepcopy(plain)
module = RockmateModule(model, None, "4GiB", mode="frames")

def step(module, model, seed):
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = module(torch.randn(int(torch.randint(1000, 2000, ())), 64))
    loss.backward()
    gradients = [each.grad for each in model.parameters()]
    return [loss.item(), *(torch.empty(0) if each is None else each for each in gradients)]

def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))

module(torch.randn(2000, 64)).backward()
module.frames.end_recording()
expected = [step(plain, plain, seed) for seed in range(STEPS)]
step(module, model, 0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (70 << 20), -1))
num_lost = 0
for seed in range(STEPS):
    try:
        step(plain, plain, seed)
    except RuntimeError as error:
        assert "allocate memory" in str(error), error
        num_lost += 1
num_recovered = 0
for seed in range(STEPS):
    assert same(step(module, model, seed), expected[seed]), seed
    num_recovered += module.frames.counts.num_dropped > 0
print(num_lost, num_recovered)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs a limit of the system")
@pytest.mark.parametrize("num_steps", [12, 30])
def test_random_steps_of_a_capped_process_recover_from_out_of_memory(num_steps: int) -> None:
    script = _CAPPED.replace("STEPS", str(num_steps))
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is free is given back at once
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    num_lost, num_recovered = map(int, finished.stdout.split())
    assert num_lost > num_steps / 2
    assert num_recovered > num_steps / 2
