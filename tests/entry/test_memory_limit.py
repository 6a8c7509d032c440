"""`memory_limit`: what it leaves for activations, by rules that optimizers confirm, and the memory
of a process that trains under it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from torch import nn

from rockmate import InfeasibleMemoryLimitError, InvalidBudgetError, RockmateModule
from rockmate.memory_limit import MemoryLimit, device_of, missing_state_bytes, present_bytes

ROOT = Path(__file__).resolve().parents[2]


def held_by(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state, one-element counters left out."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.numel() > 1)


def made_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Bytes of state that a step makes."""
    before = held_by(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return held_by(optimizer) - before


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.Conv1d(3, 5, 7), nn.LayerNorm(33))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"foreach": False}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (transformers.Adafactor, {}),
        (transformers.Adafactor, {"beta1": 0.9}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(map(str, value)),
)
def test_rules_are_what_optimizers_allocate(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    model = small_model().to(dtype)
    optimizer = cls(model.parameters(), **settings)
    assert missing_state_bytes(optimizer, model.parameters()) == made_by(optimizer, model)


def test_names_classes_and_one_without_a_rule() -> None:
    model = small_model()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for adamw in ("adamw", torch.optim.AdamW):
        assert missing_state_bytes(adamw, model.parameters()) == 2 * num_bytes
    assert missing_state_bytes("sgd", model.parameters()) == 0
    large = [torch.empty(1 << 16, device="meta")]
    assert missing_state_bytes("adamw_8bit", large) == 2 * (1 << 16) + 2 * 4 * 256
    with pytest.raises(InvalidBudgetError, match=r"'lbfgs' has no rule[\s\S]*adamw"):
        MemoryLimit(limit="1GiB", optimizer="lbfgs")
    assert missing_state_bytes(torch.optim.Rprop(model.parameters()), model.parameters()) == 0


def test_what_is_counted() -> None:
    model = models.Stack(width=256)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    limit = MemoryLimit(limit="2GiB")
    holdings = limit.holdings(model)
    assert (holdings.gradient_bytes, holdings.state_bytes) == (num_bytes, 2 * num_bytes)
    inside = MemoryLimit(limit="2GiB", optimizer="sgd", steps_in_backward=True).holdings(model)
    largest_bytes = max(parameter.nbytes for parameter in model.parameters())
    assert (inside.gradient_bytes, inside.state_bytes) == (3 * largest_bytes, 0)
    model.layers[0].requires_grad_(False)
    frozen_bytes = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    assert limit.holdings(model).gradient_bytes == num_bytes - frozen_bytes
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert limit.holdings(model).gradient_bytes == 0


def test_errors_and_budgets() -> None:
    model, x = models.Stack(), torch.randn(64, 16)
    with pytest.raises(
        InfeasibleMemoryLimitError, match="leaves nothing for activations"
    ) as caught:
        RockmateModule(model, x, memory_limit="10MiB")
    assert caught.value.limit_bytes == 10 * 2**20
    assert caught.value.held_bytes > caught.value.limit_bytes
    with pytest.raises(InvalidBudgetError, match="float"):
        RockmateModule(model, x, memory_limit=0.5)
    with pytest.raises(TypeError, match="budget and memory_limit"):
        RockmateModule(model, x, 0.5, memory_limit="1GiB")
    limit_bytes = 64 * 2**30
    module = RockmateModule(model, x, memory_limit=limit_bytes)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    left = limit_bytes - module.plan.budget_bytes - 3 * num_bytes
    # the process may have grown a little since
    assert abs(left - present_bytes(torch.device("cpu"))) <= 64 * 2**20


PROGRAM = """
import json, sys, resource
import torch
from torch import nn
torch.set_num_threads(1)
from rockmate import RockmateModule
torch.manual_seed(0)
# Many activations on few parameters, then many parameters on few activations.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)])
        self.head = nn.Sequential(nn.Linear(128, 2048), *[nn.Linear(2048, 2048) for _ in range(4)])
    def forward(self, x):
        return self.head(self.body(x).mean(0, keepdim=True))
model = Model().train()
x = torch.randn(65536, 128)
inside = sys.argv[1] == "inside"
module = RockmateModule(model, x, memory_limit=int(sys.argv[2]), optimizer="adamw", steps_in_backward=inside)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
if inside:
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter])
        def step(parameter, optimizer=optimizer):
            optimizer.step()
            parameter.grad = None
        parameter.register_post_accumulate_grad_hook(step)
else:
    optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    module(x).square().mean().backward()
    if not inside:
        optimizer.step()
        optimizer.zero_grad()
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
plan = module.plan
print(json.dumps({
    "peak": peak, "budget": plan.budget_bytes, "recomputed": plan.schedule.num_recomputations(), "baseline": plan.baseline_peak_bytes
}))
"""  # noqa: E501


def trained_process(mode: str, limit_bytes: int) -> dict[str, int]:
    """Trains two steps in a process of its own.

    The largest resident memory from after planning on.
    """
    settings = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ROCKMATE_CACHE": "off",  # each is planned for what the limit leaves to it
    }
    command = [sys.executable, "-c", PROGRAM, mode, str(limit_bytes)]
    finished = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=settings
    )
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the process's memory from /proc"
)
def test_the_memory_of_a_process_stays_below_the_limit() -> None:
    limit_bytes = 900 * 2**20
    planned = trained_process("planned", limit_bytes)
    inside = trained_process("inside", limit_bytes)
    # without recomputation it would not
    assert planned["peak"] - planned["budget"] + planned["baseline"] > limit_bytes
    assert planned["peak"] <= limit_bytes
    assert planned["recomputed"] > 0
    assert inside["peak"] <= limit_bytes
    assert inside["budget"] > planned["budget"]


def test_a_model_of_buffers_and_one_of_nothing_have_a_device() -> None:
    model = nn.Module()
    assert device_of(model) == torch.device("cpu")
    model.register_buffer("values", torch.ones(3, device="meta"))
    assert device_of(model) == torch.device("meta")
