"""Which steps are measured: those of which none before was as large in each dimension."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import zero_gradients
from made_of import made_of
from torch import Tensor, nn
from torch.nn import functional

from rockmate import RockmateModule
from rockmate._torch.allocator import Recording, timeline
from rockmate.frames.needs import FrameKey, ScheduleCost
from rockmate.frames.recorder import StepRecorder
from rockmate.frames.step_size import StepSize
from tests.frames.test_frames import Chain, batch, check, framed

WIDTH, CPU = 32, torch.device("cpu")
WAY = ScheduleCost(
    held_bytes=10, read_output_bytes=4, forward_bytes=20, backward_bytes=30, added_bytes=37,
    output_gradient_bytes=5, recompute_s=0.0, seconds=0.5,
)  # fmt: skip


@made_of(lambda: {"project": nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH))})
class Attention(nn.Module):
    """Takes memory by the square of the length."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        weights = functional.dropout((query @ key.transpose(-1, -2)).softmax(-1), 0.1)
        return x + weights @ value


@made_of(lambda: {"blocks": nn.ModuleList(Attention() for _ in range(6))})
class Attending(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Collecting(nn.Module):
    """Chance has Python collect its garbage within a forward."""

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        return x


def make_garbage(num_bytes: int) -> None:
    ring: list[object] = [torch.zeros(num_bytes, dtype=torch.uint8)]
    ring.append(ring)


def test_garbage_of_before_is_no_room() -> None:
    """Its memory is freed within the measured step and in no later one."""
    gc.disable()
    try:
        peaks = []
        for garbage_bytes in (0, 1 << 22):
            model = Attending()
            model.blocks.insert(3, Collecting())
            module = framed(model, 0.8, plan_frames=False)  # schedules depend on times
            peak(partial(make_garbage, garbage_bytes))  # the profiler knows sizes that it has seen
            for _ in range(3):
                module(torch.randn(2, 64, WIDTH)).square().mean().backward()
            report = module.frames and module.frames.report()
            assert report is not None
            peaks.append(report.minimum_bytes)
        assert peaks[0] == peaks[1]
    finally:
        gc.enable()


def peak(function: Callable[[], None]) -> int:
    return timeline(function).peak_bytes


@pytest.mark.parametrize("budget", [0.4, 0.8])
def test_longer_sequences_are_measured_though_they_have_fewer_elements(budget: float) -> None:
    model = Attending()
    module = framed(model, budget)
    zero_gradients(model)

    def step(x: Tensor) -> None:
        module(x).square().mean().backward()

    assert module.frames is not None
    for rows, length in ((16, 64), (2, 400), (1, 600)):
        x = torch.randn(rows, length, WIDTH)
        step(x)  # is measured, and holds nothing
        counts = module.frames.counts
        assert counts.num_dropped == counts.num_frames == 6
        for tolerance in (1.05, 1.02, 1.02):  # menus are made in the first of them
            measured = peak(lambda x=x: step(x))
            assert measured <= tolerance * (module.frames.budget_bytes or 0), (length, tolerance)
    needs = module.frames.needs
    step(torch.randn(8, 32, WIDTH))  # a part of the first
    assert module.frames.needs is not needs
    assert module.frames.counts.num_dropped < 6


def size(*dimensions: int) -> StepSize:
    return StepSize.of(torch.zeros(dimensions), 0, (), None)


class WithImage(Attending):
    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        return super().forward(x if image is None else x + image.mean())


def test_a_step_without_its_largest_input_saves_no_less() -> None:
    """What it saves does not count as that of a step so many times smaller."""
    module, image, found = framed(WithImage(), 0.5, plan_frames=False), torch.randn(400, 400), []
    for given, rows in ((image, 64), (image, 64), (image, 64), (None, 60), (image, 64)):
        module(torch.randn(2, rows, WIDTH), given).square().mean().backward()
        report = module.frames and module.frames.report()
        found.append(report and report.minimum_bytes)
    assert found[2] == found[4]


def test_a_step_covers_those_that_are_no_larger_in_any_dimension() -> None:
    assert size(4, 8).covers(size(4, 8))
    assert size(4, 8).covers(size(2, 8))
    assert not size(4, 8).covers(size(2, 9))
    assert not size(4, 8).covers(size(4, 8, 1))
    pairs = [torch.zeros(100, 8), torch.zeros(1, 3)]
    small_grows = StepSize.of([pairs[0][:-1], torch.zeros(1, 7)], 0, (), None)
    assert StepSize.of(pairs, 0, (), None).covers(small_grows)


def test_the_smallest_step_that_covers_another_one() -> None:
    sizes = [size(8, 8), size(2, 16), size(4, 4)]
    assert size(1, 1).smallest_covering([]) is None
    found = [size(*each).smallest_covering(sizes) for each in ((3, 3), (5, 3), (1, 9), (8, 9))]
    assert found == [sizes[2], sizes[0], sizes[1], None]


def test_a_backward_that_the_measured_step_lacked_has_it_measured_again() -> None:
    model = Chain()
    module = framed(model, 0.4)
    last = model.blocks[-1].get_parameter("layers.0.weight")

    def loss() -> Tensor:
        return module(batch(0)).square().mean()

    assert module.frames is not None
    torch.autograd.grad(loss(), last)
    torch.autograd.grad(loss(), last)
    partial = module.frames.needs
    assert partial is not None
    assert len(partial.without_backward) == 5
    loss().backward()
    loss().backward()
    loss().backward()
    whole = module.frames.needs
    assert whole is not None
    assert not whole.without_backward
    assert whole.minimum_bytes > partial.minimum_bytes


def test_forwards_of_ever_smaller_sizes_before_one_backward_are_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []

    class Counted(StepRecorder):
        def __init__(self, *args: Any, **options: Any) -> None:
            begun.append(1)
            super().__init__(*args, **options)

    monkeypatch.setattr("rockmate.frames.runner.StepRecorder", Counted)
    module = framed(Chain(num_blocks=2), 0.9, plan_frames=False)

    def step() -> None:
        sum(module(batch(0, rows)).square().mean() for rows in (64, 32, 16)).backward()

    for _ in range(5):
        step()
    begun.clear()
    for _ in range(6):  # some of these look at the peak
        step()
    assert len(begun) <= 4


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_steps_in_threads_of_their_own(where: str) -> None:
    def loss(module: nn.Module, seed: int) -> Tensor:
        def forward() -> Tensor:
            return module(batch(seed)).square().mean()

        if where == "backward" or not isinstance(module, RockmateModule):
            return forward()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(forward).result()

    def loss_in_thread(module: nn.Module, seed: int) -> Tensor:
        value = loss(module, seed)
        if where == "forward":
            return value
        with ThreadPoolExecutor(1) as pool:
            pool.submit(value.backward).result()
        return value.detach().requires_grad_()

    check(Chain("layerdrop"), loss_in_thread)


class Heavy(nn.Module):
    """Several layers with large weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def test_a_new_gradient_counts_until_it_is_in_place() -> None:
    """As it does in later steps: the needs are those of a step that finds all gradients there."""
    measured = []
    for has_gradients in (False, True):
        model = Attending()
        model.blocks = nn.ModuleList(Heavy() for _ in range(4))
        if has_gradients:
            zero_gradients(model)
        module = framed(model, 0.9, plan_frames=False)
        for _ in range(2):
            module(torch.randn(8, 256)).square().mean().backward()
        assert module.frames is not None
        assert module.frames.needs is not None
        measured.append(module.frames.needs.by_key)
    new, known = measured
    assert new.keys() == known.keys()
    for key in new:
        assert new[key].backward_bytes == known[key].backward_bytes
        assert new[key].before_backward_bytes == known[key].before_backward_bytes


@pytest.mark.parametrize("is_seen", [False, True])
def test_old_data_of_a_parameter_that_is_assigned_counts_alike(is_seen: bool) -> None:
    """Whether or not a recording before has seen its allocation."""
    key, module, before = FrameKey("a", 0), nn.Linear(64, 64), Recording(CPU)
    if not is_seen:
        before.stop()
    module.weight.data = torch.ones(64, 64)
    recorder = StepRecorder(CPU, module)
    recorder.mark(key, "forward_bytes")
    module.weight.data = torch.zeros(64, 64)
    recorder.mark(key, "after_bytes")
    assert recorder.stop(1).by_key[key].after_bytes == 64 * 64 * 4


def test_a_backward_of_other_frames_is_no_call_of_the_step() -> None:
    """As of a forward that began before a frame was left whole."""
    recorder, own, held = StepRecorder(CPU, nn.Linear(2, 2)), FrameKey("a", 0), list[Tensor]()
    for what in ("forward_bytes", "after_bytes", "backward_bytes"):
        recorder.mark(own, what)
        held.append(torch.ones(16))
    recorder.mark(FrameKey("b", 0), "backward_bytes")
    step = recorder.stop(1)
    assert (list(step.by_key), step.last_bytes) == ([own], 128)


def test_outputs_that_are_free_count_for_insides_that_read_them_again() -> None:
    first, second, third = (FrameKey(name, 0) for name in "abc")
    kept, freed = torch.ones(2), torch.ones(2)
    weight = nn.Parameter(torch.ones(2))
    weight.data = torch.inference_mode()(torch.ones)(2)  # has no node
    recorder = StepRecorder(CPU, nn.ParameterList([weight]))
    for key, output in ((first, kept), (second, freed)):
        recorder.mark(key, "forward_bytes")
        recorder.note_output(key, (output,))
    del output, freed
    recorder.mark(third, "forward_bytes")
    for key in (third, second, first):
        recorder.mark(key, "backward_bytes")
    recorder.end()
    step = recorder.stop(1)
    assert step.without_outputs == {third: {second}, second: {second}}
    before = {key: replace(needs) for key, needs in step.by_key.items()}
    for number in (1, 2):
        step.set_schedules(number, {"a": [WAY], "b": [WAY]})
        for key, num_bytes in ((first, 0), (second, 4), (third, 4)):
            needs, old = step.by_key[key], before[key]
            assert needs.backward_bytes == old.backward_bytes + num_bytes
            assert needs.before_backward_bytes == old.before_backward_bytes + num_bytes
            assert needs.forward_bytes == old.forward_bytes + num_bytes
            assert needs.after_bytes == old.after_bytes + num_bytes
    step.set_schedules(0, {})
    assert step.by_key == before


def test_a_schedule_takes_more_where_gradients_are_copied_or_added() -> None:
    assert WAY.within(copies=False, adds=False) == WAY
    assert WAY.within(copies=False, adds=True).backward_bytes == 37
    assert WAY.within(copies=True, adds=True).backward_bytes == 42
    assert WAY.scaled(2.0).read_output_bytes == 8


def test_a_step_that_is_still_recorded_ends_where_another_model_is_planned() -> None:
    unfinished, model = framed(Chain())(batch(0)), nn.Sequential(nn.Linear(64, 3), nn.Tanh())
    RockmateModule(model, batch(0), 1.0, untraced=["1"])(batch(0)).sum().backward()
    unfinished.sum().backward()
