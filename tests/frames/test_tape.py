"""Single saved tensors that their ops make again: the same bits, what they free, and refusals."""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate import RockmateModule
from rockmate._torch.allocator import timeline
from rockmate._torch.storage import storage_id, version_of
from rockmate.errors import UnsupportedModelError
from rockmate.frames.derivation import TapedFrame, derivations
from rockmate.frames.frame import Frame
from rockmate.frames.noting_cost import NotingCost, noting_cost
from rockmate.frames.op_states import OpStates, StatesOfOp
from rockmate.frames.saved import Saved
from rockmate.frames.tape import Recipe, Tape
from rockmate.frames.views import View

pytestmark = pytest.mark.model

ROWS, WIDTH = 64, 32

STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, w: functional.gelu(x) * x,
    lambda x, w: functional.linear(x, w),
    lambda x, w: functional.layer_norm(x, (WIDTH,)) + 1,
    lambda x, w: (x * 2).relu_(),
    lambda x, w: torch.cat((x[: ROWS // 2], x[ROWS // 2 :].tanh())),
    lambda x, w: functional.dropout(x, 0.2),
    lambda x, w: functional.batch_norm(x, None, None, training=True),
    lambda x, w: x.t().contiguous().mul_(0.5).t().softmax(-1),
    lambda x, w: x + x.mean(0, keepdim=True).exp(),
    lambda x, w: torch.where(x > 0, x.sin(), x)[:, torch.arange(WIDTH)],
    lambda x, w: x.split(WIDTH // 2, 1)[1].repeat(1, 2).sigmoid(),
)


@pytest.mark.parametrize("seed", range(40))
def test_what_ops_make_again_has_the_same_bits(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH) / 6
    kept = [x]  # every value stays, so that it can be compared
    tape = Tape("block", [storage_id(x), storage_id(weight)], time.perf_counter)
    with tape.observing():
        for _ in range(10):
            kept.append(draw.choice(STEPS)(draw.choice(kept[-3:]), weight))
    values = {tape.state_of(each): each for each in kept[1:]}
    values.pop(-1, None)
    num_made = 0
    for _ in range(6):
        wanted = set(draw.sample(sorted(values), draw.randint(1, len(values))))
        held = {
            state: Saved(each, (storage_id(each),), version_of(each))
            for state, each in values.items()
            if state not in wanted
        }
        if tape.can_make(wanted, held):
            made = tape.make(wanted, held)
            for state in wanted:
                again = tape.viewed(made[state], state, View.of(values[state]))
                assert torch.equal(again, values[state])
                assert storage_id(again) != storage_id(values[state])
                num_made += 1
    if seed == 0:
        assert num_made


def random_frame(draw: random.Random) -> TapedFrame:
    """Ops of some states; 0 comes from outside."""
    states = [0]
    ops: list[StatesOfOp] = []
    num_states = 1
    for _ in range(draw.randint(2, 9)):
        read = frozenset(draw.sample(states, min(len(states), draw.randint(1, 2))))
        new, num_states = num_states, num_states + 1
        if draw.random() < 0.2 and (writable := read - {0}):
            before = draw.choice(sorted(writable))
            ops.append(StatesOfOp(read, (), ((before, new),), can_repeat=True))
            states.remove(before)
        else:
            ops.append(StatesOfOp(read, (new,), (), draw.random() < 0.85))
        states.append(new)
    live = [each for each in states if each]
    own = frozenset(draw.sample(live, draw.randint(1, len(live))))
    held = frozenset(each for each in live if each not in own and draw.random() < 0.3)
    return TapedFrame(
        ops=(), states=tuple(ops), seconds=tuple(draw.random() for _ in ops),
        outside=frozenset((0,)), num_bytes=tuple(draw.randint(1, 9) for _ in range(num_states)),
        own=own, held=held,
    )  # fmt: skip


def played(frame: TapedFrame, order: tuple[int, ...], given_up: frozenset[int]) -> int:
    """Runs ops with a set of what is in memory; the most bytes beside what was saved."""
    saved = frame.own | frame.held
    memory = {0, *(saved - given_up)}
    most = 0
    for number, at in enumerate(order):
        op = frame.states[at]
        assert op.can_repeat
        before = {one for one, _ in op.rewritten}
        assert op.inputs <= memory
        assert before.isdisjoint(frame.own - given_up)
        memory = (memory - before) | set(op.all_outputs)
        most = max(most, sum(frame.num_bytes[each] for each in memory - {0}))
        later = {each for other in order[number + 1 :] for each in frame.states[other].inputs}
        memory = {each for each in memory if each in saved or each in later or not each}
    assert given_up <= memory
    return most - sum(frame.num_bytes[each] for each in saved)


def test_derivations_grow_and_can_be_played() -> None:
    cost = noting_cost()
    num_found = num_extra = 0
    for seed in range(300):
        frame = random_frame(random.Random(seed))
        found = derivations(frame)
        for each in found:
            num_found += 1
            num_extra += each.extra_bytes > 0
            assert each.num_bytes == sum(frame.num_bytes[state] for state in each.states)
            noted_s = len(each.order) * (cost.noted_s + cost.repeated_s)
            noted_s += len(frame.states) * cost.seen_s
            ran_s = sum(frame.seconds[at] for at in each.order)
            assert each.seconds == pytest.approx(ran_s + noted_s)
            assert each.extra_bytes == played(frame, each.order, each.states)
        for one, other in pairwise(found):
            assert one.states < other.states
    assert num_found > 200
    assert num_extra > 10


def test_what_cannot_run_again_makes_nothing() -> None:
    ops = [
        StatesOfOp(frozenset((0,)), (1,), (), can_repeat=False),
        StatesOfOp(frozenset((1,)), (2,), (), can_repeat=True),
    ]
    assert OpStates(ops).ops_for({2}, {0, 1}) == [1]
    assert OpStates(ops).ops_for({2}, {0}) is None
    assert OpStates(ops).ops_for({1}, {0}) is None
    assert OpStates(ops).ops_for({3}, {0, 1, 2}) is None


class Block(nn.Module):
    """Functions without modules of their own between products, as many models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 12 * WIDTH), nn.Linear(6 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.changes_ops = self.writes_unseen = False

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.first(self.norm(x)).chunk(2, -1)
        y = functional.silu(gate) * value
        if self.writes_unseen:
            y.detach().numpy()[...] *= 2  # no op, and no count of writes
        y = y.mul(0.5).relu_() if not self.changes_ops else y.mul(0.5).abs()
        return x + self.last(functional.dropout(y, 0.1, self.training))


def model_of(num_blocks: int = 6) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(Block(), nn.Identity()) for _ in range(num_blocks)))


def train(module: nn.Module, model: nn.Module, seed: int, rows: int = 512) -> list[Any]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = module(torch.randn(rows, WIDTH)).square().mean()
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters()), *model.buffers()]


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Frames whose ops have made something again."""
    monkeypatch.setattr(
        "rockmate.frames.derivation.noting_cost",
        lambda: noting_cost()._replace(seen_s=0, noted_s=0, begun_s=0, repeated_s=0),
    )
    derivations.cache_clear()
    found: list[str] = []
    derive = Frame._derive

    def noted(self: Frame) -> None:
        found.append(self.key.path)
        derive(self)

    monkeypatch.setattr(Frame, "_derive", noted)
    return found


@pytest.mark.parametrize("budget", [0.8, 0.6, 0.45])
def test_equal_to_eager_within_the_budget(budget: float, derived: list[str]) -> None:
    torch.manual_seed(0)
    model = model_of()
    plain = copy.deepcopy(model)
    module = RockmateModule(
        model, None, budget, mode="frames", on_infeasible="least", plan_frames=False
    )
    for seed in range(6):
        ours, expected = train(module, model, seed), train(plain, plain, seed)
        assert all(map(torch.equal, ours, expected))
    assert derived
    model.zero_grad(set_to_none=False)
    x = torch.randn(512, WIDTH)
    measured = timeline(lambda: module(x).square().mean().backward()).peak_bytes
    assert module.frames is not None
    assert module.frames.budget_bytes is not None
    assert measured <= 1.01 * module.frames.budget_bytes
    report = module.frames.report()
    assert report is not None
    assert "made again by their ops" in report.table()


def test_other_ops_than_those_known_are_not_used(derived: list[str]) -> None:
    """The block runs other ops than were measured: the whole block runs again."""
    torch.manual_seed(0)
    model = model_of()
    plain = copy.deepcopy(model)
    module = RockmateModule(
        model, None, 0.6, mode="frames", on_infeasible="least", plan_frames=False
    )
    for seed in range(5):
        train(module, model, seed)
        train(plain, plain, seed)
    assert derived
    for each in (*model.modules(), *plain.modules()):
        if isinstance(each, Block):
            each.changes_ops = True
    derived.clear()
    ours, expected = train(module, model, 9), train(plain, plain, 9)
    assert all(map(torch.equal, ours, expected))
    assert not derived


def test_memory_that_is_written_unseen_is_not_made_again_by_ops(derived: list[str]) -> None:
    torch.manual_seed(0)
    model = model_of()
    for each in model.modules():
        if isinstance(each, Block):
            each.writes_unseen = True
            each.norm = nn.Identity()  # type: ignore[assignment]
    plain = copy.deepcopy(model)
    module = RockmateModule(
        model, None, 0.5, mode="frames", on_infeasible="least", plan_frames=False
    )
    for seed in range(6):
        ours, expected = train(module, model, seed), train(plain, plain, seed)
        assert all(map(torch.equal, ours, expected))
    assert module.frames is not None
    assert any(module.frames._memory.wrong_ops.values())


def test_a_parameter_that_changes_before_the_backward_is_named(derived: list[str]) -> None:
    torch.manual_seed(0)
    model = model_of()
    module = RockmateModule(
        model, None, 0.6, mode="frames", on_infeasible="least", plan_frames=False
    )
    for seed in range(5):
        train(module, model, seed)
    assert derived
    loss = module(torch.randn(512, WIDTH)).square().mean()
    with torch.no_grad():
        for each in model.modules():
            if isinstance(each, Block):
                each.first.bias.add_(1.0)  # a value that autograd does not save
    with pytest.raises(UnsupportedModelError, match=r"changed in place .* keep=\['\d"):
        loss.backward()


def test_a_recipe_notes_no_other_op() -> None:
    x = torch.randn(4, 4)
    whole = Tape("block", [storage_id(x)], time.perf_counter)
    with whole.observing():
        _ = x.sin().cos() + 1
    tape = Tape("block", [storage_id(x)], time.perf_counter, Recipe(whole.ops, frozenset((1,))))
    with tape.observing():
        y = x.sin()
        z = y.cos()
        _ = z + 1
    assert tape.ops == whole.ops[1:2]
    held = {tape.state_of(y): Saved(y, (storage_id(y),), version_of(y))}
    wanted = {tape.state_of(z)}
    assert tape.can_make(wanted, held)
    assert torch.equal(tape.make(wanted, held)[tape.state_of(z)], z)
    y.zero_()
    changed = {tape.state_of(y): Saved(y, (storage_id(y),), version_of(y))}
    assert not tape.can_make(wanted, changed)


def test_compiled_modules_have_no_tape(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(2)
    model[0][0].compile(backend="eager")
    module = RockmateModule(
        model, None, 0.9, mode="frames", on_infeasible="least", plan_frames=False
    )
    caplog.set_level(logging.ERROR)
    for seed in range(3):
        train(module, model, seed)
    assert module.frames is not None
    assert module.frames._memory.wanted_tape(next(iter(module.frames.needs.by_key))) == (
        False,
        None,
    )


def test_the_way_to_a_tape_is_no_time_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that a tape has seen take as long as others, not the double."""
    monkeypatch.setattr("rockmate.frames.frame.noting_cost", lambda: NotingCost(1e9, 0.0, 0.0))
    model = model_of()
    module = RockmateModule(model, None, 0.5, mode="frames", on_infeasible="least")
    for seed in range(2):
        train(module, model, seed)
    assert module.frames is not None
    assert module.frames.needs is not None
    needs = module.frames.needs.by_key.values()
    assert needs
    assert all(each.seconds < 1e-3 for each in needs), [each.seconds for each in needs]
    assert NotingCost(3.0, 2.0, 0.0, by_tape_s=1.5).unseen_s == 3.5
    assert NotingCost(1.0, 2.0, 0.0, by_tape_s=9.0).unseen_s == 0.0
