"""Trials keep the budget, and say where they cannot be made."""

from __future__ import annotations

import functools
import logging
import queue
from collections import UserDict
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn
from trial_net import BATCHES, Net

from rockmate import RockmateModule, TrialError
from rockmate._torch.allocator import timeline
from rockmate.entry import runnable_call
from rockmate.state.call_state import CallState
from rockmate.state.digest import Fingerprint


def test_a_forward_larger_than_the_budget_is_stopped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It holds all that it makes; a plan knows that it is not needed."""

    @made_of(lambda: {"layers": nn.ModuleList(nn.Linear(64, 64) for _ in range(12))})
    class Holding(nn.Module):
        def forward(self, x: Any) -> Any:
            hidden = [x]
            for layer in self.layers:
                hidden.append(layer(hidden[-1]).sin())
            return hidden[-1].square().mean()

    model, x = Holding(), torch.randn(512, 64)
    module = RockmateModule(model, x, 0.35, numerics="bitwise", trial="log")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with caplog.at_level(logging.INFO, logger="rockmate"):
        found = timeline(lambda: module(x).backward())
    assert "is not held against eager, since the plain forward takes more than" in caplog.text
    assert found.peak_bytes <= module.plan.budget_bytes


@made_of(lambda: {"layers": nn.ModuleList(nn.Linear(64, 64) for _ in range(8))})
class Forces(nn.Module):
    """The gradient of an energy, and code for compilers that may leave it out."""

    leaves_out = False

    def forward(self, x: Any) -> Any:
        is_left = self.leaves_out and torch.compiler._is_compiling_flag
        scale = vars(x).get("_scale")
        h = leaf = x
        for number, layer in enumerate(self.layers):
            h = layer(h).tanh()
            if number == 3:
                h = leaf = h.detach().requires_grad_(not is_left)
        force = x if is_left else torch.autograd.grad(h.sum(), leaf, create_graph=True)[0]
        return (h + force).square().mean() * (scale or 1.0)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_gradient_within_is_tried_below_eagers_peak_or_told(*, leaves_out: bool) -> None:
    """A trial drops what it has read and does not read. Where it alone takes one, there is none."""
    model, x = Forces(), torch.randn(512, 64)
    model.leaves_out = leaves_out
    module: Any = RockmateModule(model, x, 0.6, numerics="bitwise", on_infeasible="least")
    vars(x)["_scale"] = 2.0
    with pytest.raises(TrialError, match="takes a gradient" if leaves_out else "output is"):
        module(x)


def test_a_script_is_told_what_eager_tells_it_while_its_model_is_captured() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    model.register_forward_hook(lambda *given: given[-1] * (1 + torch.compiler.is_compiling()))
    assert torch.equal(RockmateModule(model, x, 1.0, trial="never")(x), model(x))


@pytest.mark.parametrize(
    ("option", "expected"), [("log", [1, 2, 4]), ("always", [1, 2, 3, 4]), ("never", [])]
)
def test_trials_are_at_powers_of_two(
    option: Any, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = RockmateModule(Net(), BATCHES[0], 1.0, trial=option, numerics="bitwise")
    run, steps, present = runnable_call.run_beside_eager, list[int](), 0

    def noted(*args: Any) -> Any:
        steps.append(present)
        return run(*args)

    monkeypatch.setattr(runnable_call, "run_beside_eager", noted)
    for present, batch in enumerate(BATCHES, 1):  # noqa: B007
        module(batch)["loss"].backward()
    assert steps == expected


def test_an_unknown_option_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="choose 'log', 'always' or 'never'"):
        RockmateModule(Net(), None, 0.5, trial="sometimes")  # pyright: ignore


@functools.lru_cache
def drawn_once(rows: int) -> Tensor:
    return torch.rand(rows, 1)


class Scaled(Net):
    def forward(self, x: Any) -> Any:
        return super().forward(x * drawn_once(len(x)))


def test_auto_ends_in_eagers_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """No plan draws what a cache keeps, but frames do; trials leave no results."""
    found = []
    for wrap in (False, True):
        drawn_once.cache_clear()
        torch.manual_seed(0)
        model: Any = Scaled()
        module = RockmateModule(model, BATCHES[0], 0.9, mode="auto", trial="log") if wrap else model
        torch.manual_seed(1)
        losses = []
        for batch in BATCHES:
            losses.append(module(batch)["loss"])
            losses[-1].backward()
        found.append([*losses, torch.get_rng_state()])
    assert all(map(torch.equal, *found))
    assert "kept by frames instead of a plan, since drawn_once draws random" in caplog.text


def test_a_trace_leaves_nothing_in_caches() -> None:
    model: Any = Net()
    model.table = functools.cache(lambda rows: torch.ones(rows, 1))
    model.register_forward_pre_hook(lambda net, given: (given[0] * net.table(len(given[0])),))
    RockmateModule(model, BATCHES[0], 0.9)
    assert model.table(64).sum() == 64


class Loader(UserDict[str, Any]):
    """Batches that another thread makes."""


LOADER = Loader(items=queue.Queue())


class Fed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * max(1, LOADER["items"].qsize()))


def test_what_another_thread_puts_into_a_queue_is_not_taken_back() -> None:
    with CallState(Fed(), (BATCHES[0],), {}).undone():
        LOADER["items"].put(0)
    assert LOADER["items"].qsize() == 1


def test_nested_tensors_are_compared() -> None:
    parts = [torch.ones(2, 3), torch.zeros(4, 3)]
    lists = (parts, [each.clone() for each in parts], parts[::-1])
    made = [torch.nested.nested_tensor(each, layout=torch.jagged) for each in lists]
    one, same, other = (Fingerprint.of(each, is_exact=True).bits for each in made)
    assert one == same != other


@functools.cache
def kept() -> Tensor:
    return torch.ones(())


class Keeping(Net):
    def forward(self, x: Any) -> Any:
        return {"loss": super().forward(x)["loss"] * kept()}


def test_a_trial_leaves_in_caches_what_eager_does() -> None:
    """Else a call for inference fills them, with what no training can save."""
    module = RockmateModule(Keeping(), BATCHES[0], 0.9)
    module(BATCHES[0])
    with torch.inference_mode():
        module(BATCHES[0])
    module.original(BATCHES[0])["loss"].backward()
