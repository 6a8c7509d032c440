"""The budget of frames holds, or is refused, and measuring ends: steps that other code makes."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn
from torch.nn import functional

from rockmate import InfeasibleBudgetError, RockmateModule, timeline
from rockmate._torch.engine import is_profiling
from rockmate.checks.cases import cases
from rockmate.frames.budget_check import PeakCheck
from rockmate.frames.runner import FrameRunner
from rockmate.frames.selection import inner_paths

WIDTH = 32


@made_of(lambda: {"first": nn.Linear(WIDTH, 8 * WIDTH), "second": nn.Linear(8 * WIDTH, WIDTH)})
class Segments(nn.Module):
    """Applies a block to each segment: calls of equal sizes run another number of ops."""

    def forward(self, x: Tensor, cuts: Tensor) -> Tensor:
        places = cuts.tolist()
        parts = [self.first(x[i:j]) for i, j in pairwise(places)]
        return x + torch.cat([self.second(torch.tanh(each)) for each in parts])


@made_of(lambda: {"blocks": nn.ModuleList(Segments() for _ in range(6))})
class Packed(nn.Module):
    def forward(self, x: Tensor, cuts: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cuts)
        return x.square().mean()


def block_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))


@made_of(lambda: {"blocks": nn.ModuleList(block_of(8 * WIDTH) for _ in range(8))})
class Blocks(nn.Module):
    """Blocks without a class of their own, and control flow that depends on values."""

    def forward(self, x: Any) -> Tensor:
        x = x if isinstance(x, Tensor) else x["x"] if isinstance(x, UserDict) else x.x
        for block in self.blocks:
            x = x + block(x) if float(x.detach().mean()) < 1e9 else x
        return x.square().mean()


def peak_of(module: nn.Module, *args: Any) -> int:
    module.zero_grad(set_to_none=False)
    return timeline(lambda: module(*args).backward()).peak_bytes


def frames_after(num_steps: int, module: RockmateModule, *args: Any) -> FrameRunner:
    for _ in range(num_steps):
        module(*args).backward()
    assert module.frames is not None
    return module.frames


def of_check() -> tuple[nn.Module, Tensor]:
    """Its first frame is split, and the others are tried in parts that save no memory."""
    case = next(each for each in cases(torch.device("cpu"), "") if each.name == "frames")
    return case.build()


@pytest.mark.parametrize("gradients", ["zero", "zero after six", "accumulated", "between"])
@pytest.mark.parametrize("kind", ["check", "packed"])
def test_each_step_keeps_the_budget(
    kind: str, gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, *args = of_check() if kind == "check" else (Packed(), torch.randn(200, WIDTH))
    args += [torch.tensor([0, 200])] if kind == "packed" else []
    plain(*args).backward()
    budget = int(0.7 * peak_of(plain, *args))
    module = RockmateModule(plain, None, budget, mode="frames")
    measured = list[int]()  # in each step that may be
    monkeypatch.setattr(PeakCheck, "note", lambda _, peak: measured.append(peak))
    monkeypatch.setattr(PeakCheck, "is_due", lambda self, **_: not self._memory.room.is_capturing)
    for step in range(8):
        if gradients not in ("accumulated", "between") or step % 3 == 0:
            plain.zero_grad(set_to_none=gradients == "zero after six" and step < 6)
        loss = module(*args)
        if gradients == "between":  # forward and backward, as tutorials do
            plain.zero_grad()
        loss.backward()
        del loss
        assert module.frames is not None
        if not module.frames._memory.room.is_capturing:
            assert module.frames._memory.log.peak_bytes <= budget
    module.frames.end_recording()
    assert len(measured) >= 4
    assert max(measured) <= budget
    assert set(module.frames._memory.calls.shares().values()) == {1.0}


class Decayed(Segments):
    """Changes its parameter in its own forward, so it cannot run again."""

    def forward(self, x: Tensor, cuts: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.99)
        return super().forward(x, cuts)


def test_what_a_frame_that_cannot_be_dropped_holds_counts_once() -> None:
    plain, x, cuts = Packed(), torch.randn(200, WIDTH), torch.tensor([0, 200])
    plain.blocks[1] = Decayed()
    module = RockmateModule(plain, None, int(0.8 * peak_of(plain, x, cuts)), mode="frames")
    frames = frames_after(6, module, x, cuts)
    assert peak_of(module, x, cuts) <= (frames.budget_bytes or 0)


def test_what_runs_between_the_backwards_of_planned_frames_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PeakCheck, "is_due", lambda *_, **__: False)  # no look that learns of it
    plain, x = Blocks(), torch.randn(200, WIDTH)
    plain.blocks[6] = block_of(24 * WIDTH)
    budget, keep = int(0.8 * peak_of(plain, x)), ["blocks.6"]
    module = RockmateModule(plain, None, budget, mode="frames", keep=keep)
    frames = frames_after(6, module, x)
    assert frames.counts.num_planned
    assert peak_of(module, x) <= budget


def test_frames_that_cannot_be_dropped_are_refused_at_the_second_step() -> None:
    """By a budget that works, though it is known only later what frames within them need."""
    x, cuts = torch.randn(200, WIDTH), torch.tensor([0, 200])
    budget, num_steps = 1000, []
    for _ in range(2):
        plain = Packed()
        plain.blocks = nn.ModuleList(Decayed() if number else Segments() for number in range(6))
        module = RockmateModule(plain, None, budget, mode="frames")
        try:
            for step in range(6):
                num_steps.append(step)
                module(x, cuts).backward()
        except InfeasibleBudgetError as error:
            budget = error.minimum_bytes
    assert num_steps == [0, 1, *range(6)]
    assert budget <= 1.05 * peak_of(plain, x, cuts)


def test_steps_that_a_profiler_watches_cannot_be_measured(caplog: pytest.LogCaptureFixture) -> None:
    module, x = RockmateModule(Blocks(), None, 0.5, mode="frames"), torch.randn(200, WIDTH)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for _ in range(2):
            module(x).backward()
    assert caplog.text.count("nothing keeps the budget of 0.5") == 1
    assert frames_after(2, module, x).needs is not None


def test_calls_of_equal_sizes_that_run_other_ops() -> None:
    module = RockmateModule(Packed(), None, 0.5, mode="frames")
    x = torch.randn(200, WIDTH)
    cuts = [torch.tensor(each) for each in ([0, 200], [0, 50, 200], [0, 30, 60, 200])]
    for step in range(12):
        module(x, cuts[step % 3]).backward()
    assert module.frames is not None
    for each in cuts:
        assert peak_of(module, x, each) <= (module.frames.budget_bytes or 0)


def two_views(module: Any, x: Tensor) -> None:
    (module(x) + module(2 * x)).backward()


def critic(module: Any, x: Tensor) -> None:
    """Two forwards beside a graph that is kept for a second derivative, as of a penalty."""
    mixed = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(module(mixed), mixed, create_graph=True)
    (slope.square().sum() + module(x) - module(-x)).backward()


def two_losses(module: Any, x: Tensor) -> None:
    loss = module(x)
    loss.backward(retain_graph=True)
    loss.square().backward()


@pytest.mark.parametrize(
    ("script", "share", "times"), [(two_views, 0.5, 1), (two_losses, 0.4, 1), (critic, 1.0, 3)]
)
def test_the_budget_that_an_error_names_is_kept(script: Any, share: float, times: int) -> None:
    plain, x, budget = Blocks(), torch.randn(200, WIDTH), 1000
    for refused in [True] * times + [False]:
        module = RockmateModule(plain, None, budget, mode="frames")
        try:
            for _ in range(9):
                plain.zero_grad(set_to_none=False)
                script(module, x)
        except InfeasibleBudgetError as error:
            assert refused
            budget = error.minimum_bytes
    assert budget <= share * timeline(lambda: script(plain, x)).peak_bytes
    assert timeline(lambda: script(module, x)).peak_bytes <= budget


def test_a_second_forward_that_comes_once_does_not_end_the_training() -> None:
    plain, x, budget = Blocks(), torch.randn(200, WIDTH), 1000
    for num_steps in (2, 8):
        module = RockmateModule(plain, None, budget, mode="frames")
        try:
            for step in range(num_steps):
                (module(x) + (module(2 * x) if step == 4 else 0)).backward()
        except InfeasibleBudgetError as error:
            budget = error.minimum_bytes
    assert module.frames is not None
    assert module.frames.budget_bytes == budget > 1000


def keep_graph(module: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)


def differentiate(module: nn.Module, loss: Tensor) -> None:
    torch.autograd.grad(loss, [*module.parameters()], create_graph=True)


@pytest.mark.parametrize("script", [keep_graph, differentiate])
def test_steps_whose_graphs_are_kept_for_ever_are_looked_at(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = RockmateModule(Blocks(), None, "8 MiB", mode="frames"), torch.ones(9, WIDTH)
    measured = list[int]()
    monkeypatch.setattr(PeakCheck, "note", lambda _, peak: measured.append(peak))
    for _ in range(8):
        loss = module(x)  # lives until the next one has run
        script(module, loss)
    assert measured


def test_insides_are_planned_again_where_graphs_are_kept_no_more() -> None:
    module, x = RockmateModule(Blocks(), None, 0.9, mode="frames"), torch.randn(100, WIDTH)
    assert module.frames is not None
    num_planned = list[int]()
    for step in range(22):
        module(x).backward(retain_graph=step == 4)
        num_planned.append(module.frames.counts.num_planned)
    assert num_planned[4] > 0 == num_planned[5] < num_planned[21]


@made_of(lambda: {"first": Blocks(), "second": Blocks()})
class Detached(nn.Module):
    """No gradient of its second output reaches the first frame, which holds what it saves."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first.blocks[0](x)
        return y, self.second(y.detach())


class Stateful(Blocks):
    """Makes its own state where it is given none: what it takes does not follow from its inputs."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        return super().forward(x + (torch.ones(200, WIDTH) if state is None else state))


def test_steps_of_small_inputs_that_make_large_tensors() -> None:
    plain, x, state = Stateful(), torch.randn(1, WIDTH), torch.randn(200, WIDTH)
    budget = int(0.5 * peak_of(plain, x, state))
    module = RockmateModule(plain, None, budget, mode="frames")
    frames_after(2, module, x, state)
    for step in range(12):
        given = (x,) if step % 3 == 2 else (x, state)
        assert step < 3 or peak_of(module, *given) <= budget, step
        module(*given).backward()


def test_outputs_that_the_script_keeps_are_no_forwards_in_flight() -> None:
    module, kept = RockmateModule(Detached(), None, 0.9, mode="frames", plan_frames=False), []
    assert module.frames is not None
    for _ in range(5):
        kept.append(module(torch.randn(100, WIDTH)))
        kept[-1][1].backward()
    assert module.frames._memory.in_flight.most_beside(1, counts_one=True) == 0


def test_the_one_submodule_of_a_wrapper_is_passed_through() -> None:
    tower = nn.Module()  # as backbones of detectors
    tower.inner = Blocks()
    blocks = [f"tower.inner.blocks.{number}" for number in range(8)]
    assert inner_paths(nn.ModuleDict({"tower": tower}), "tower") == blocks
    assert inner_paths(nn.ModuleDict({"several": nn.ModuleList([tower])}), "") == ["several.0"]


def test_blocks_without_a_class_of_their_own_that_the_script_appends_are_frames() -> None:
    plain, x = Blocks(), torch.randn(200, WIDTH)
    module = RockmateModule(plain, None, peak_of(plain, x) // 2, mode="frames")
    for step in range(8):
        if step == 3:
            plain.blocks.extend(Blocks().blocks[:2])
        module(x).backward()
    assert module.frames is not None
    assert module.frames.paths == tuple(f"blocks.{number}" for number in range(10))
    assert peak_of(module, x) <= (module.frames.budget_bytes or 0)


@dataclass
class Batch:
    x: Tensor


@pytest.mark.parametrize("make", [Batch, lambda x: UserDict(x=x)])
def test_inputs_in_objects(make: Any) -> None:
    plain, x = Blocks(), torch.randn(200, WIDTH)
    module = RockmateModule(plain, None, 0.5, mode="frames")
    frames = frames_after(4, module, make(x))
    assert peak_of(module, make(x)) <= (frames.budget_bytes or 0)


@made_of(lambda: {"embedding": nn.Embedding(100, WIDTH, sparse=True), "blocks": Blocks()})
class Bag(nn.Module):
    """An embedding with sparse gradients, and blocks behind it."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.embedding(tokens))


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    plain, tokens = Bag(), torch.randint(100, (200,))
    (expected,) = torch.autograd.grad(plain(tokens), plain.embedding.weight)
    module = RockmateModule(plain, None, 0.5, mode="frames")
    for _ in range(3):
        module.zero_grad()
        module(tokens).backward()
        found = plain.embedding.weight.grad
        assert found is not None
        assert torch.equal(found.to_dense(), expected.to_dense())


@made_of(lambda: {"first": nn.Linear(WIDTH, 64 * WIDTH), "second": nn.Linear(64 * WIDTH, WIDTH)})
class Layers(nn.Module):
    """Layers right in the root: no call can be a frame."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = functional.gelu(hidden) if float(hidden.detach().sum()) < 1e9 else hidden
        return self.second(hidden).square().mean()


def test_where_no_call_can_be_a_frame(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(8, WIDTH)
    module = RockmateModule(Layers(), None, 0.5, mode="frames")
    module(x).backward()
    module.eval()
    with torch.no_grad():
        module(x)
    module.train()
    with pytest.raises(InfeasibleBudgetError, match="no call can be a frame") as caught:
        module(x)
    followed = RockmateModule(Layers(), None, caught.value.minimum_bytes + 64, mode="frames")
    for _ in range(3):
        followed(x).backward()
    for options in ({"mode": "auto"}, {"mode": "frames", "on_infeasible": "least"}):
        caplog.clear()
        module = RockmateModule(Layers(), None, 0.5, **options)
        for _ in range(3):
            module(x).backward()
        assert sum("nothing keeps the budget of" in each for each in caplog.messages) == 1


@pytest.mark.parametrize("num_alone", [0, 1, 6])
def test_several_forwards_of_which_no_call_can_be_a_frame(num_alone: int) -> None:
    """Their peak is that of all, also where steps before had one forward each."""
    plain, x = Layers(), torch.randn(256, WIDTH)
    plain(x).backward()
    budget = int(1.3 * peak_of(plain, x))
    module = RockmateModule(plain, None, budget, mode="frames")
    for _ in range(num_alone):
        module(x).backward()
    caught = None
    for _ in range(5):
        try:
            (module(x) + module(x)).backward()
        except InfeasibleBudgetError as error:
            caught = error
    assert "no call can be a frame" in str(caught)
    evaluated = RockmateModule(Layers(), None, "1 GiB", mode="frames")
    for _ in range(40):  # never a backward
        evaluated(x)
    assert not is_profiling()


def test_a_model_that_gets_another_precision_is_measured_anew() -> None:
    plain, x = Blocks(), torch.randn(256, WIDTH)
    module = RockmateModule(plain, None, 0.5, mode="frames")
    for _ in range(3):
        module(x).backward()
    plain.double()
    frames = frames_after(4, module, x.double())
    assert peak_of(module, x.double()) <= (frames.budget_bytes or 0)


def test_players_that_are_trained_in_turn(caplog: pytest.LogCaptureFixture) -> None:
    """Frames of frozen parameters save other tensors, so what each player needs is measured."""
    plain, x = Blocks(), torch.randn(256, WIDTH)
    module = RockmateModule(plain, None, 1500 << 10, mode="frames")
    for step in range(10):
        plain.blocks[:4].requires_grad_(step % 2 == 0)
        plain.blocks[4:].requires_grad_(step % 2 == 1)
        module(x).backward()
        plain.zero_grad()
    assert "a step has taken" not in caplog.text


@pytest.mark.parametrize("mode", ["plan", "auto", "frames"])
def test_a_call_without_gradients_before_the_backward(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(100, WIDTH)
    module = RockmateModule(nn.Sequential(*Blocks().blocks), x, 0.9, mode=mode)
    for step in range(4):
        with torch.no_grad():
            module(x)
        assert caplog.text.count("waits for its backward") == min(step, 1)
        output = module(x)
        with torch.no_grad():
            other = module(2 * x)
        (output - other).square().sum().backward()
    assert mode != "frames" or (module.frames and module.frames.needs)
    assert not is_profiling()


def test_calls_without_a_backward_are_not_measured_for_ever() -> None:
    module, x = RockmateModule(Blocks(), None, 0.5, mode="frames"), torch.randn(200, WIDTH)
    for _ in range(4):
        module(x)
    assert not is_profiling()
    frames = frames_after(3, module, x)
    assert frames.needs is not None
    assert peak_of(module, x) <= (frames.budget_bytes or 0)
