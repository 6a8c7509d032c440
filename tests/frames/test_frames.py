"""Training in a budget without a captured graph: as eager, bit for bit, within the budget."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_alike, assert_trains_alike, records_of, zero_gradients
from made_of import made_of, mlp
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from rockmate import RockmateModule
from rockmate._torch.allocator import timeline
from rockmate._torch.engine import is_profiling
from rockmate.errors import InfeasibleBudgetError, UnsupportedModelError

WIDTH = 64


class Block(nn.Module):
    """Normalization with statistics, dropout, a residual and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.layers = mlp(WIDTH, 4 * WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + self.drop(self.layers(self.norm(x))) / self.num_calls


class Chain(nn.Module):
    """Blocks one after the other; some take part by chance, or by their input."""

    def __init__(self, kind: str = "plain", num_blocks: int = 6) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if self.kind == "layerdrop" and torch.rand([]) < 0.3:
                continue
            x = block(x)
            if self.kind == "halting" and x.square().mean() > 2 + index / 4:
                break
            if self.kind == "shared":
                x = self.blocks[0](x).sin()
            if self.kind == "python random" and random.random() < 0.5:
                x = x * 2
        return self.head(x)


def batch(seed: int, rows: int = 128) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(module: nn.Module, seed: int, rows: int = 128) -> Tensor:
    return module(batch(seed, rows)).square().mean()


def framed(model: nn.Module, budget: float | str = 0.5, **options: Any) -> RockmateModule:
    return RockmateModule(model, None, budget, mode="frames", on_infeasible="least", **options)


def check(
    model: nn.Module, loss: Callable[[nn.Module, int], Tensor] = loss_of, budget: float = 0.4
) -> RockmateModule:
    plain = copy.deepcopy(model)
    module = framed(model, budget)
    assert_trains_alike(module, plain, loss)
    for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert getattr(mine, "num_calls", 0) == getattr(theirs, "num_calls", 0)
        assert "forward" not in vars(mine)
    return module


def test_python_random_numbers_between_frames_are_drawn_once() -> None:
    check(Chain("python random"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_function_in_torchscript_in_which_a_second_run_ends() -> None:
    class Scripted(Block):
        bend = staticmethod(torch.jit.script(_bent))

        def forward(self, x: Tensor) -> Tensor:
            return self.bend(super().forward(x))

    model = Chain()
    model.blocks = nn.ModuleList(Scripted() for _ in range(4))
    for _ in range(3):  # TorchScript optimizes, and rounds otherwise from then on
        loss_of(model, 0).backward()
    zero_gradients(model)
    check(model, budget=0.6)


def _bent(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.5 * x)


def accumulation_and_two_calls_before_a_backward(module: nn.Module, seed: int) -> Tensor:
    loss_of(module, seed + 10).backward()
    return loss_of(module, seed) + loss_of(module, seed + 20)


def two_backwards_of_one_graph(module: nn.Module, seed: int) -> Tensor:
    value = loss_of(module, seed)
    value.backward(retain_graph=True)
    return value


def batches_of_several_sizes(module: nn.Module, seed: int) -> Tensor:
    return loss_of(module, seed, (64, 200, 3, 128)[seed])


def autocast_around_the_forward_alone(module: nn.Module, seed: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(batch(seed))
    return output.float().square().mean()


def attributes_and_modes_changed_before_the_backward(module: nn.Module, seed: int) -> Tensor:
    value = loss_of(module, seed)
    module.eval()
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.9
    value.backward(retain_graph=True)
    module.train()
    return value


@pytest.mark.parametrize(
    "loss",
    [
        accumulation_and_two_calls_before_a_backward, two_backwards_of_one_graph,
        batches_of_several_sizes, autocast_around_the_forward_alone,
        attributes_and_modes_changed_before_the_backward,
    ],
)  # fmt: skip
def test_steps_of_scripts(loss: Callable[[nn.Module, int], Tensor]) -> None:
    check(Chain(), loss)


def test_hooks_of_parameters_and_modules_fire_as_in_eager() -> None:
    def noted(model: Chain, module: nn.Module) -> list[str]:
        found: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
        for name, each in list(model.blocks.named_children())[1:]:
            each.register_forward_hook(lambda *_, name=name: found.append(f"forward {name}"))
            each.register_full_backward_hook(lambda *_, name=name: found.append(f"back {name}"))
        for step in range(3):
            loss_of(module, step).backward()
        return found

    model = Chain()
    plain = copy.deepcopy(model)
    assert noted(model, framed(model)) == noted(plain, plain)


def peak_of(module: RockmateModule, model: nn.Module, rows: int) -> int:
    zero_gradients(model)
    x = batch(0, rows)
    return timeline(lambda: module(x).square().mean().backward()).peak_bytes


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.7, 0.9, 1.0])
def test_peak_is_within_the_budget(budget: float) -> None:
    model = Chain(num_blocks=8)
    module = framed(model, budget)
    for step in range(4):
        loss_of(module, step, 1024).backward()
    assert module.frames is not None
    module.frames.end_recording()
    budget_bytes = module.frames.budget_bytes or 0
    eager = copy.deepcopy(model)
    eager_peak = peak_of(eager, eager, 1024)  # pyright: ignore[reportArgumentType]
    assert budget_bytes <= 1.02 * budget * eager_peak
    assert peak_of(module, model, 1024) <= 1.01 * budget_bytes


def test_a_step_larger_than_all_before_holds_nothing_and_is_measured_anew() -> None:
    model = Chain(num_blocks=8)
    grown, large = framed(model, 0.7), framed(copy.deepcopy(model), 0.7)
    for module, sizes in ((grown, (512, 512, 512, 1024)), (large, (1024,))):
        for step, rows in enumerate(sizes):
            loss_of(module, step, rows).backward()
    assert grown.frames is not None
    assert large.frames is not None
    for frames in (grown.frames, large.frames):
        frames.end_recording()
        assert frames.counts.num_dropped == frames.counts.num_frames > 0
    ours, expected = grown.frames, large.frames
    assert ours.needs is not None
    assert expected.needs is not None
    assert abs(ours.needs.minimum_bytes / expected.needs.minimum_bytes - 1) < 0.01
    for step in range(3):
        loss_of(grown, step, 1024).backward()
    assert peak_of(grown, model, 1024) <= 1.01 * (ours.budget_bytes or 0)


def test_too_small_a_budget_names_the_smallest_which_works() -> None:
    model = Chain()
    module = RockmateModule(model, None, "1KiB", mode="frames")
    loss_of(module, 0).backward()
    with pytest.raises(InfeasibleBudgetError, match="smallest peak found") as caught:
        loss_of(module, 1)
    again = RockmateModule(model, None, caught.value.minimum_bytes, mode="frames")
    for step in range(4):
        loss_of(again, step).backward()


class Chance(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x.sin().cos().exp()


def test_a_frame_that_does_not_repeat_itself_is_named_and_can_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Chain()
    model.blocks[2] = Chance()
    monkeypatch.setattr(random, "random", iter((0.1, 0.9)).__next__)
    value = loss_of(framed(model), 0)
    with pytest.raises(UnsupportedModelError, match=r"blocks\.2 .*keep=\['blocks\.2'\]"):
        value.backward()
    monkeypatch.undo()
    module = framed(model, keep=["blocks.2"])
    for step in range(4):
        loss_of(module, step).backward()


class Doubling(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


class Overwritten(Chain):
    """Changes the input of a block after its call."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            y = block(y)
        with torch.no_grad():
            x.mul_(2)
        return self.head(y)


def test_an_input_changed_after_its_call_is_named() -> None:
    model = Overwritten()
    model.blocks[0] = Doubling()
    loss_of(model, 0).backward()  # eager has no need of it
    value = loss_of(framed(model), 0)
    with pytest.raises(UnsupportedModelError, match=r"an input of blocks\.0 .*changed in place"):
        value.backward()
    loss_of(framed(model, keep=["blocks.0"]), 0).backward()


class Forces(Chain):
    """Returns the gradient of what it computes, and branches on a value on the way."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        if energy.sum() > 1e9:
            energy = energy * 2
        (force,) = torch.autograd.grad(energy.tanh().sum(), x, create_graph=True)
        return energy.mean() + force


@pytest.mark.parametrize("budget", [0.4, 0.7, 1.0])
def test_gradients_within_a_forward_and_penalties_in_a_script(budget: float) -> None:
    def penalized(module: Any, seed: int) -> Tensor:
        x = batch(seed).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return (gradient.norm(dim=-1) - 1).square().mean()

    for make, loss in ((Forces, loss_of), (Chain, penalized)):
        check(make(), loss, budget)
        assert not is_profiling()


class Short(Block):
    """Runs out of memory once in the call of a number."""

    fails_at = -1

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.num_calls == Short.fails_at:
            Short.fails_at = -1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output


def test_a_frame_that_runs_out_of_memory_runs_again_after_others_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Chain()
    model.blocks[4] = Short()
    plain = copy.deepcopy(model)
    expected = records_of(plain, plain, loss_of)
    monkeypatch.setattr(Short, "fails_at", 3)  # nothing is held in the first, measured step
    # As on a device or in a process whose allocations can fail.
    monkeypatch.setattr("rockmate.frames.memory.free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr("rockmate.frames.memory.Memory.bytes_if_kept", lambda *_: None)
    module = framed(model, 1.0, plan_frames=False)  # so each frame can be dropped
    assert_alike(records_of(module, model, loss_of), expected)
    assert Short.fails_at == -1


@made_of(lambda: {"layers": nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Tanh()), "num_calls": 0})
class ShortInBackward(nn.Module):
    """Cheap for its bytes, so that it is the one to run again; runs out of memory once in that."""

    is_to_fail = False

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        made = self.layers(x.repeat(1, 16))
        if ShortInBackward.is_to_fail:
            ShortInBackward.is_to_fail = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + made.unflatten(1, (16, -1)).mean(1) / self.num_calls


def test_a_second_run_that_runs_out_of_memory_runs_again_after_others_are_dropped() -> None:
    model = Chain()
    model.blocks[5] = nn.Sequential(ShortInBackward(), nn.Tanh())
    plain = copy.deepcopy(model)
    expected = records_of(plain, plain, loss_of)
    module = framed(model, 0.8)

    def failing(each: nn.Module, seed: int) -> Tensor:
        value = loss_of(each, seed)
        ShortInBackward.is_to_fail = seed == 1  # the step after the measured one
        return value

    assert_alike(records_of(module, model, failing), expected)
    assert not ShortInBackward.is_to_fail


def test_auto_says_what_frames_leave_out(caplog: pytest.LogCaptureFixture) -> None:
    marks, in_flight = {"blocks.*": "save"}, 2
    with caplog.at_level(logging.WARNING):
        RockmateModule(
            Chain("halting"), batch(0), 0.5, mode="auto", marks=marks, in_flight=in_flight
        )
    assert "by frames instead of a plan, without marks and in_flight, since" in caplog.text


def test_auto_plans_where_it_can() -> None:
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1), nn.Softplus()
    module = RockmateModule(nn.Sequential(*layers), batch(0), 1.0, mode="auto")
    assert module.is_planned
    assert module.frames is None


@pytest.mark.parametrize("is_twice", [False, True])
def test_auto_sees_in_a_first_step_whether_a_script_differentiates_twice(is_twice: bool) -> None:
    """A plan, which has no second derivative, takes over where none was wanted."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Dropout(0.1))
    plain = copy.deepcopy(model)
    module = RockmateModule(
        model, None, 0.7, mode="auto", on_infeasible="least", numerics="bitwise"
    )
    for step in range(3):
        found = []
        for each in (module, plain):
            each.zero_grad()
            x = batch(step).requires_grad_()
            torch.manual_seed(step)
            y = each(x)
            (penalty,) = torch.autograd.grad(y.sum(), x, create_graph=True) if is_twice else (y,)
            (y.square().mean() + penalty.square().mean()).backward()
            found.append([x.grad, *(parameter.grad for parameter in each.parameters())])
        assert all(map(torch.equal, *found))
    assert (module.frames is not None) == is_twice
    assert module.is_planned != is_twice


@pytest.mark.parametrize("has_sample", [False, True])
def test_auto_takes_frames_where_there_is_no_graph(
    has_sample: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Chain("halting")
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        module = RockmateModule(model, batch(0) if has_sample else None, 0.5, mode="auto")
        ours = records_of(module, model, loss_of)
    assert "frames instead of a plan, since" in caplog.text
    assert module.frames is not None
    assert_alike(ours, records_of(plain, plain, loss_of))


def test_auto_takes_frames_where_the_trace_alone_fails() -> None:
    class Traced(Chain):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler._is_compiling_flag:
                raise TypeError("no mask")
            return super().forward(x)

    model = Traced()
    module = RockmateModule(model, batch(0), 0.5, mode="auto")
    loss_of(module, 0).backward()
    assert module.frames is not None


def test_a_refusal_ends_in_the_line_that_works() -> None:
    with pytest.raises(UnsupportedModelError, match='mode="frames"'):
        RockmateModule(Chain("halting"), batch(0), 0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": False},
        {"use_reentrant": True},
        # Warnings are errors here: hooks of a frame are none of the user's.
        {
            "use_reentrant": False,
            "context_fn": partial(
                create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
            ),
        },
    ],
    ids=["plain", "reentrant", "selective"],
)
def test_checkpoints_within_frames(options: dict[str, Any]) -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Any = checkpoint(self.layers, self.norm(x), **options)
            return x + self.drop(y)

    model = Chain()
    for index in (1, 3):
        model.blocks[index] = Checkpointed()
    check(model)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "late"}, ValueError, "choose 'plan', 'frames' or 'auto'"),
        ({"mode": "frames", "untraced": ["head"]}, TypeError, "untraced belongs to planning"),
        ({"keep": ["head"]}, TypeError, 'needs mode="frames"'),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RockmateModule(Chain(), batch(0), 0.5, **options)


class Around(nn.Module):
    """A checkpoint around all blocks, or around some."""

    def __init__(self, use_reentrant: bool, num_within: int) -> None:
        super().__init__()
        self.use_reentrant, self.num_within = use_reentrant, num_within
        self.first, self.second = Chain(num_blocks=num_within), nn.Identity()
        self.first.head = nn.Linear(WIDTH, WIDTH)
        if num_within < 6:
            self.second = nn.Sequential(*(Block() for _ in range(6 - num_within)))

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        return self.second(y).cos()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("num_within", [3, 6])
def test_frames_within_checkpoints_run_as_they_are(
    use_reentrant: bool, num_within: int, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(module: nn.Module, seed: int) -> Tensor:
        return module(batch(seed).requires_grad_()).square().mean()

    module = check(Around(use_reentrant, num_within), loss)
    assert module.frames is not None
    assert caplog.text.count("nothing keeps the budget") == (num_within == 6)
    assert module.frames.counts.num_frames == 6 - num_within


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_profiler_can_start_right_after_a_measured_backward(use_reentrant: bool | None) -> None:
    model = Chain() if use_reentrant is None else Around(use_reentrant, 2)
    module = framed(model)
    module(batch(0).requires_grad_()).square().mean().backward()
    assert module.frames is not None
    assert module.frames.needs is not None
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(3).sum()
    assert profiled.events()


def test_a_failed_backward_leaves_no_profiler() -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("stop")

    model = Chain()
    model.get_parameter("blocks.0.norm.weight").register_hook(fail)
    value = loss_of(framed(model), 0)
    with pytest.raises(KeyError):
        value.backward()
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(3).sum()


def test_a_step_of_two_backwards_is_measured_whole() -> None:
    @made_of(lambda: {"first": Chain(), "second": Chain()})
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x)

    model = Two()
    module = framed(model, 0.6)
    for step in range(4):
        one, other = module(batch(step))
        one.square().mean().backward()
        other.square().mean().backward()
    assert module.frames is not None
    needs = module.frames.needs
    assert needs is not None
    assert all(each.backward_bytes > 0 for each in needs.by_key.values())
