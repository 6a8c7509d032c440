"""Trained weights at home on a disk, with gradients and optimizer's states: eager's bits."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moves
import pytest
import torch
from helpers import net_allocated
from moves import Net, rows
from torch import nn

import rockmate.memory_limit
from bench.measure import allocator_peak
from rockmate import BackwardError, Plan, RockmateModule
from rockmate.errors import InfeasibleMemoryLimitError, InvalidArgumentError, OffloadError
from rockmate.memory_limit import MemoryLimit
from rockmate.offload.weight_home import homes_of
from rockmate.schedule.offload_request import OffloadRequest

QUICK: dict[str, Any] = {"time_limit_s": 0.5, "numerics": "bitwise", "weights": "all"}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def pair() -> tuple[nn.Module, nn.Module]:
    model = Net(*moves.layers(128, 16)).train()
    return model, copy.deepcopy(model)


def module_of(folder: Path, model: nn.Module, **bound: Any) -> RockmateModule:
    """The model within a third of its weights."""
    third = sum(each.nbytes for each in model.parameters()) // 3
    options = {"offload": f"disk:{folder}", **QUICK, **(bound or {"budget": third})}
    module = RockmateModule(model, rows(), **options)
    assert module.plan.schedule.fetches
    return module


def stepped(model: nn.Module, name: str, *, in_backward: bool) -> torch.optim.Optimizer | None:
    """An optimizer, or hooks which step each parameter and free its gradient."""
    if not in_backward:
        return OPTIMIZERS[name](model.parameters())
    own = {each: OPTIMIZERS[name]([each]) for each in model.parameters()}

    def hook(parameter: Any) -> None:
        own[parameter].step()
        parameter.grad = None

    for each in own:
        each.register_post_accumulate_grad_hook(hook)
    return None


def train(module: Any, optimizer: torch.optim.Optimizer | None, seed: int) -> list[float]:
    losses = []
    for part in range(2):  # the second one adds to gradients at home
        loss = module(rows(2 * seed + part))
        loss.backward()
        losses.append(loss.item())
    if optimizer is not None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()  # sends the state home
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_training_has_the_bits_of_eager_in_the_memory_of_activations(
    name: str, *, in_backward: bool, tmp_path: Path
) -> None:
    model, eager = pair()
    plan = module_of(tmp_path, model).plan
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.schedule, loaded.simulation) == (plan.schedule, plan.simulation)
    assert "at home in the disk" in loaded.summary()
    tried, x = RockmateModule(model, rows(), plan=loaded, trial="always"), rows(1)
    assert allocator_peak(lambda: tried(x).backward()) <= plan.budget_bytes
    model.zero_grad()
    module = RockmateModule(model, rows(), plan=loaded, trial="never")
    ours, theirs = (stepped(each, name, in_backward=in_backward) for each in (model, eager))
    for seed in range(4):
        assert train(module, ours, seed) == train(eager, theirs, seed)
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
    # Nothing is left on the device but the number of steps that each state has.
    number = len([*model.parameters()])
    assert net_allocated(lambda: train(module, ours, 4)) <= 64 * number
    peak_bytes = allocator_peak(lambda: module(x).backward())
    spare_bytes = 3 * 128 * 128 * 4 if in_backward else 0  # of the step of an optimizer
    assert 0 <= peak_bytes - plan.predicted_peak_bytes <= spare_bytes


def test_gradients_that_a_script_keeps_are_not_written_to(tmp_path: Path) -> None:
    model, eager = pair()
    module, kept = module_of(tmp_path, model), list[list[Any]]()
    for callee, owner in ((module, model), (eager, eager)):
        owner.get_parameter("6.weight").register_hook(lambda gradient: 2 * gradient)
        kept.append([])
        for seed in range(3):
            callee(rows(seed)).backward()
            kept[-1] += [each.grad for each in owner.parameters()]
            owner.zero_grad()
    assert all(map(torch.equal, *kept))


def test_a_weight_that_changes_between_forward_and_backward_is_an_error(tmp_path: Path) -> None:
    model, _ = pair()
    loss = module_of(tmp_path, model)(rows())
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1)
    with pytest.raises(BackwardError, match="changed in place after the forward"):
        loss.backward()


def test_a_memory_limit_counts_neither_gradients_nor_states_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair()
    monkeypatch.setattr(rockmate.memory_limit, "present_bytes", lambda _: 1_000_000)
    limit = 1_400_000
    with pytest.raises(InfeasibleMemoryLimitError):
        MemoryLimit(limit=limit).activation_budget_bytes(model, "auto")
    assert module_of(tmp_path, model, memory_limit=limit).plan.budget_bytes <= 400_000


def test_a_slow_link_is_told_with_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, read = module_of(tmp_path, pair()[0]), os.preadv

    def slow(*arguments: Any) -> int:
        time.sleep(1e-3)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    with caplog.at_level(logging.WARNING, "rockmate"):
        for seed in range(5):
            module(rows(seed)).backward()
    (line,) = [each.getMessage() for each in caplog.records if "first steps" in each.msg]
    told = line.split("The link is slower than described: copies take ")[1]
    assert float(told.partition("x")[0]) > 10
    assert float(told.rpartition(", ")[2].split()[0]) >= len(module.plan.schedule.fetches) / 2


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair()
    with pytest.raises(InvalidArgumentError, match="'returned' has none"):
        module_of(tmp_path, model, budget=1, gradients="returned")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(OffloadError, match="for one process"):
        homes_of(model).hold({}, OffloadRequest("disk", str(tmp_path), with_trained=True))
