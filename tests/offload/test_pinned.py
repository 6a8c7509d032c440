"""Pinned memory, rehearsed without a GPU: streams that do their work as late as they may.

Ops run on the CPU and stand for the step's stream C. A copy is put into the queue of its stream and
runs when C waits for an event behind it. So whatever reads too early finds other bits.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_gradients
from made_of import made_of
from moves import X, layers, module_of, step
from torch import nn
from torch.overrides import TorchFunctionMode

import rockmate.runtime.step_arguments
from rockmate import RockmateModule, send_home
from rockmate.errors import OffloadError
from rockmate.offload import pinned_tier, weight_home
from rockmate.offload.pinned_tier import PinnedTier

LOG: list[tuple[str, Any]] = []


class LateStream:
    """A queue of copies. It has no way to make the host wait."""

    def __init__(self, device: object = None) -> None:
        del device
        self.queue: list[Callable[[], object]] = []
        self.num_done = 0

    def wait_stream(self, other: LateStream) -> None:
        LOG.append(("wait_stream", (self, other)))
        # C is ahead of every queue: it has run all that was asked of it.
        assert other is MAIN[0]

    def wait_event(self, event: LateEvent) -> None:
        LOG.append(("wait_event", (self, event)))
        assert self is MAIN[0]
        event.stream.run_until(event.number)

    def run_until(self, number: int) -> None:
        while self.num_done < number:
            self.queue[self.num_done]()
            self.num_done += 1


class LateEvent:
    """The end of a stream's queue at some time."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: LateStream) -> None:
        self.stream, self.number = stream, len(stream.queue)

    def elapsed_time(self, _: LateEvent) -> float:
        return 0.0


@made_of(lambda stream: {"stream": stream})
class Queueing(TorchFunctionMode):
    """Puts copies into the queue of a stream."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            target, source = args
            assert kwargs == {"non_blocking": True}
            LOG.append(("copy", self.stream))
            self.stream.queue.append(lambda: target.copy_(source))
            return target
        return func(*args, **(kwargs or {}))


@contextmanager
def on_stream(stream: LateStream) -> Iterator[None]:
    with Queueing(stream):
        yield


MAIN = [LateStream()]


@pytest.fixture(autouse=True)
def late_streams(monkeypatch: pytest.MonkeyPatch) -> PinnedTier:
    LOG.clear()
    MAIN[0] = LateStream()
    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: MAIN[0])
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(pinned_tier, "_check_device", lambda _: None)
    monkeypatch.setattr(pinned_tier, "_pinned", lambda n: torch.full((n,), 255, dtype=torch.uint8))
    tier = PinnedTier()
    monkeypatch.setattr(rockmate.runtime.step_arguments, "tier_of", lambda *_: tier)
    return tier


def test_late_copies_bring_back_the_bits(tmp_path: Path, late_streams: PinnedTier) -> None:
    module = module_of(tmp_path)
    eager = copy.deepcopy(module.original)
    for number in range(3):
        same_gradients(module, eager, lambda callee, x=X + number: step(callee, x))
    assert late_streams.num_bytes == module.plan.simulation.host_bytes


def half_frozen() -> nn.Module:
    """The model with weights frozen, and biases trained."""
    model = layers().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


@pytest.mark.parametrize("is_home", [False, True])
def test_weights_come_and_go_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_home: bool
) -> None:
    monkeypatch.setattr(weight_home, "tier_of", lambda *_: PinnedTier())
    model = half_frozen()
    eager = copy.deepcopy(model)
    home = f"disk:{tmp_path}"
    if is_home:
        send_home(model, home)
    budget = sum(each.nbytes for each in model.parameters())
    module = RockmateModule(model, X, budget, offload=home, weights="auto")
    assert len(module.plan.schedule.fetches) > len(module.plan.schedule.moves) // 2
    for number in range(3):
        same_gradients(module, eager, lambda callee, x=X + number: step(callee, x))
        with torch.no_grad():
            for each in model[0].weight, eager[0].weight:
                each.mul_(1 + number)
            assert torch.equal(model(X), eager(X))
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))


def test_each_copy_waits_for_the_step_and_is_waited_for(tmp_path: Path) -> None:
    module = module_of(tmp_path, trial="never")
    step(module)
    number = len(module.plan.schedule.moves)
    kinds = [kind for kind, _ in LOG]
    assert kinds.count("copy") == kinds.count("wait_stream") == kinds.count("wait_event")
    assert kinds.count("copy") == 2 * number
    for place, (kind, stream) in enumerate(LOG):
        if kind == "copy":
            assert LOG[place - 1] == ("wait_stream", (stream, MAIN[0]))
    streams = {stream for kind, stream in LOG if kind == "copy"}
    assert len(streams) == 2
    assert MAIN[0] not in streams
    assert not hasattr(LateStream, "synchronize")


def test_an_abandoned_step_is_waited_for_before_its_memory_goes(
    tmp_path: Path, late_streams: PinnedTier
) -> None:
    module = module_of(tmp_path)
    issue = pinned_tier.PinnedSlab.copy_out
    copies = []

    def noted(*args: Any) -> Any:
        copies.append(issue(*args))
        if len(copies) == 2:
            raise KeyboardInterrupt
        return copies[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_tier.PinnedSlab, "copy_out", noted)
        with pytest.raises(KeyboardInterrupt):
            module(X)
    gc.collect()
    assert all(each.is_waited_for for each in copies)
    assert late_streams.num_bytes == module.plan.simulation.host_bytes
    step(module)


def test_pinned_memory_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def fail(_: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pinned_tier, "pinned", fail)
    with pytest.raises(OffloadError, match=r"take 4,096 bytes of pinned.*host_budget"):
        PinnedTier().borrow(4096)
    assert PinnedTier(8192).num_bytes == 0
    with pytest.raises(OffloadError, match=r"host_budget is 100"):
        PinnedTier(100).borrow(4096)


def test_values_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(pinned_tier, "_pinned", lambda n: torch.empty(n, dtype=torch.uint8))
    slab = PinnedTier().borrow(4096)
    with pytest.raises(OffloadError, match="one of this step is on cpu"):
        slab.copy_out(0, torch.zeros(16, dtype=torch.uint8))
