"""Trained weights at home on a disk, with gradients and optimizer's states: eager's bits, and
nothing of them in the device's memory."""

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
from torch import Tensor, nn

import rockmate.memory_limit
from bench.measure import allocator_peak
from rockmate import BackwardError, Plan, RockmateModule
from rockmate.errors import InfeasibleMemoryLimitError, InvalidArgumentError, OffloadError
from rockmate.memory_limit import MemoryLimit
from rockmate.offload.request import OffloadRequest
from rockmate.offload.weight_home import homes_of

QUICK: dict[str, Any] = {"time_limit_s": 0.5, "numerics": "bitwise", "weights": "all"}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


class Net(nn.Sequential):
    """Layers with the loss behind them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Net(*[part for _ in range(16) for part in (nn.Linear(128, 128), nn.GELU())]).train()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(seed))


def size_of(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


def module_of(folder: Path, model: nn.Module, **options: Any) -> RockmateModule:
    """The model within a third of its weights."""
    bound = options or {"budget": size_of(model) // 3}
    module = RockmateModule(model, rows(), offload=f"disk:{folder}", **QUICK, **bound)
    assert module.plan.schedule.fetches
    return module


def step_of(model: nn.Module, name: str, *, in_backward: bool) -> Callable[[], None]:
    """Steps the optimizer, unless hooks do that for each parameter, and frees gradients."""
    if not in_backward:
        optimizer = OPTIMIZERS[name](model.parameters())

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step
    own = {each: OPTIMIZERS[name]([each]) for each in model.parameters()}

    def hook(parameter: Tensor) -> None:
        own[parameter].step()  # pyright: ignore[reportArgumentType]
        parameter.grad = None

    for each in own:
        each.register_post_accumulate_grad_hook(hook)
    return lambda: None


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_training_has_the_bits_of_eager_in_the_memory_of_activations(
    name: str, *, in_backward: bool, tmp_path: Path
) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    module = module_of(tmp_path, model)
    steps = [step_of(each, name, in_backward=in_backward) for each in (model, eager)]

    def train(callee: Any, step: Callable[[], None], seed: int) -> list[float]:
        losses = []
        for part in range(2):  # the second one adds to gradients at home
            loss = callee(rows(2 * seed + part))
            loss.backward()
            losses.append(loss.item())
        step()
        return losses

    def at_home() -> None:
        assert train(module, steps[0], 0) == losses

    losses = train(eager, steps[1], 0)
    # Of states, the number of each step is no tensor of weights.
    assert net_allocated(at_home) <= 64 * len([*model.parameters()])
    for seed in range(1, 4):
        assert train(module, steps[0], seed) == train(eager, steps[1], seed)
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
    x = rows(1)
    peak_bytes = allocator_peak(lambda: module(x).backward())
    spare_bytes = 3 * model[0].weight.nbytes if in_backward else 0  # of the step of an optimizer
    assert 0 <= peak_bytes - module.plan.predicted_peak_bytes <= spare_bytes
    assert not list(tmp_path.iterdir())


def test_gradients_that_a_script_keeps_are_not_written_to(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    module, kept = module_of(tmp_path, model), list[list[Any]]()
    model[6].weight.register_hook(lambda gradient: 2 * gradient)
    eager[6].weight.register_hook(lambda gradient: 2 * gradient)
    for callee, owner in ((module, model), (eager, eager)):
        found = []
        for seed in range(3):
            callee(rows(seed)).backward()
            found += [each.grad for each in owner.parameters()]
            owner.zero_grad()
        kept.append(found)
    assert all(map(torch.equal, *kept))
    del kept, found
    x = rows(1)
    assert net_allocated(lambda: module(x).backward()) == 0


def test_a_weight_that_changes_between_forward_and_backward_is_an_error(tmp_path: Path) -> None:
    model = layers()
    module = module_of(tmp_path, model)
    loss = module(rows())
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1)
    with pytest.raises(BackwardError, match="changed in place after the forward"):
        loss.backward()


def test_a_plan_file_and_a_saved_optimizer_go_on_where_they_were(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    plan = module_of(tmp_path, model).plan
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.offload == plan.offload
    for each in (RockmateModule(model, rows(), plan=loaded), eager):
        optimizer = OPTIMIZERS["adamw"](each.parameters())
        for seed in range(3):
            each(rows(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = OPTIMIZERS["adamw"](each.parameters())
            optimizer.load_state_dict(state)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_a_memory_limit_counts_neither_gradients_nor_states_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    monkeypatch.setattr(rockmate.memory_limit, "present_bytes", lambda _: 1_000_000)
    limit = 1_000_000 + size_of(model) // 3
    with pytest.raises(InfeasibleMemoryLimitError):
        MemoryLimit(limit=limit).activation_budget_bytes(model, "auto")
    module = module_of(tmp_path, model, memory_limit=limit)
    assert module.plan.budget_bytes <= size_of(model) // 3


def test_a_slow_link_is_told_with_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moves.use_fast_link(monkeypatch)
    module, read = module_of(tmp_path, layers()), os.preadv

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
    assert float(told.rpartition(", ")[2].split()[0]) >= 1e-3 * len(module.plan.schedule.fetches)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    with pytest.raises(InvalidArgumentError, match="'returned' has none"):
        module_of(tmp_path, model, budget=1, gradients="returned")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(OffloadError, match="for one process"):
        homes_of(model).hold((), OffloadRequest("disk", str(tmp_path), with_trained=True))
