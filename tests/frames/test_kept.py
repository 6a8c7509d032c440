"""Frames that drop nothing run without hooks: as eager, within the budget whatever follows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import assert_alike
from made_of import made_of
from torch import Tensor, nn

from rockmate import RockmateModule
from rockmate.errors import InfeasibleBudgetError
from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey
from tests.frames.test_frames import Block, Chain, check, framed, loss_of, peak_of

ROWS = 512


def steps(module: RockmateModule, num_steps: int, rows: int = ROWS) -> list[int]:
    """Trains; how many frames were kept in each step."""
    found = []
    for step in range(num_steps):
        loss_of(module, step, rows).backward()
        found.append(memory_of(module).log.counts.num_kept)
    return found


def memory_of(module: RockmateModule) -> Memory:
    assert module.frames is not None
    return module.frames._memory


def test_with_room_for_all_frames_are_kept() -> None:
    module = framed(Chain(), "1GiB")
    kept = steps(module, 6)
    assert kept[:2] == [0, 0]
    assert kept[2:] == [6, 6, 6, 6]
    assert memory_of(module).held_bytes == 0


@pytest.mark.parametrize("budget", [0.25, 0.8, 1.0])
@pytest.mark.parametrize("kind", ["plain", "layerdrop", "halting", "shared"])
def test_equal_to_eager(kind: str, budget: float) -> None:
    def loss(module: nn.Module, seed: int) -> Tensor:
        for more in range(3):  # frames are kept from the third step on
            loss_of(module, seed + 10 * more).backward()
        return loss_of(module, seed)

    module = check(Chain(kind), loss, budget)
    assert memory_of(module).calls.saved_bytes
    if kind != "layerdrop":  # the first step may have fewer layers than others
        assert (memory_of(module).log.counts.num_recomputed > 0) == (budget < 1.0)


def test_two_backwards_hold_what_is_kept() -> None:
    module = framed(Chain(), "1GiB")
    steps(module, 4)
    memory = memory_of(module)
    value = loss_of(module, 0, ROWS)
    before = memory.storages.kept_bytes
    assert before > 0
    value.backward(retain_graph=True)
    assert memory.storages.kept_bytes == before
    value.backward()
    assert memory.storages.kept_bytes == 0


def test_a_graph_without_a_backward_lets_go() -> None:
    module = framed(Chain(), "1GiB")
    steps(module, 4)
    value = loss_of(module, 0, ROWS)
    assert memory_of(module).storages.kept_bytes > 0
    del value
    assert memory_of(module).storages.kept_bytes == 0


class Growing(Chain):
    """More blocks run in some steps than in the others before."""

    num_blocks = 3

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[: self.num_blocks]:
            x = block(x)
        return self.head(x)


def test_the_budget_holds_when_more_calls_follow_than_were_known() -> None:
    model = Growing(num_blocks=10)
    model.num_blocks = 10
    module = framed(model, 0.4)
    steps(module, 3)
    budget_bytes = memory_of(module).budget_bytes or 0
    model.num_blocks = 3
    assert max(steps(module, 20)) > 0
    model.num_blocks = 10
    assert peak_of(module, model, ROWS) <= 1.01 * budget_bytes
    assert memory_of(module).log.counts.num_kept > 0
    assert memory_of(module).log.counts.num_recomputed > 0


def test_calls_that_were_not_recorded_add_their_inputs_to_the_smallest_peak() -> None:
    model = Growing(num_blocks=10)
    module = RockmateModule(model, None, 1, mode="frames", on_infeasible="least")
    steps(module, 3)
    before = memory_of(module).budget_bytes
    assert before is not None
    model.num_blocks = 10
    steps(module, 1)
    assert peak_of(module, model, ROWS) > 1.05 * before
    steps(module, 1)
    budget_bytes = memory_of(module).budget_bytes or 0
    assert peak_of(module, model, ROWS) <= 1.01 * budget_bytes


def test_a_budget_below_the_smallest_peak_of_later_calls_is_refused() -> None:
    model = Growing(num_blocks=10)
    free = RockmateModule(copy.deepcopy(model), None, "1GiB", mode="frames")
    steps(free, 3)
    needs = memory_of(free).needs
    assert needs is not None
    module = RockmateModule(model, None, needs.minimum_bytes, mode="frames")
    steps(module, 3)
    model.num_blocks = 10
    steps(module, 1)
    with pytest.raises(InfeasibleBudgetError, match="smallest peak found"):
        steps(module, 1)


def test_a_change_of_mode_starts_anew() -> None:
    module = framed(Chain(), "1GiB")
    assert steps(module, 5)[-1] > 0
    module.blocks[2].drop.eval()
    assert steps(module, 1) == [0]
    assert steps(module, 1)[0] > 0


def test_a_kept_frame_that_runs_out_of_memory_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(module: Any, model: nn.Module, fails: bool) -> list[Tensor]:
        for step in range(6):
            loss_of(module, step, ROWS).backward()
        failures = iter([fails])

        def forward(self: Block, x: Tensor, plain: Any = Block.forward) -> Tensor:
            output = plain(self, x)
            if self is model.get_submodule("blocks.4") and next(failures, False):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return output

        with monkeypatch.context() as patch:
            patch.setattr(Block, "forward", forward)
            torch.manual_seed(3)
            loss_of(module, 9, ROWS).backward()
        assert next(failures, None) is None
        return [each.detach().clone() for each in (*model.buffers(), torch.get_rng_state())] + [
            each.grad for each in model.parameters() if each.grad is not None
        ]

    # Elsewhere an allocation cannot fail, and nothing is taken that could take back a run.
    monkeypatch.setattr("rockmate.frames.memory.free_bytes", lambda _: 1 << 40)
    model = Chain(num_blocks=8)
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = trained(plain, plain, fails=False)
    torch.manual_seed(1)
    module = framed(model, 0.7, plan_frames=False)  # schedules depend on times
    assert_alike(trained(module, model, fails=True), expected)


@made_of(lambda: {"has_last": False})
class Late(Chain):
    """Its last block comes only later."""

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[: None if self.has_last else -1]:
            x = block(x)
        return self.head(x)


def test_a_layer_that_the_first_steps_lack_is_known_when_it_has_come() -> None:
    model = Late()
    module = framed(model, 0.6)
    for step in range(7):
        model.has_last = step >= 3
        loss_of(module, step, ROWS).backward()
        needs = memory_of(module).needs
        assert (needs is not None and FrameKey("blocks.5", 0) in needs.by_key) == (step >= 3)
    assert memory_of(module).held_bytes == 0
    assert needs is not None
    saved = {path: needs.of(FrameKey(path, 0)).saved_bytes for path in ("blocks.4", "blocks.5")}
    assert saved["blocks.5"] == saved["blocks.4"]


def test_a_loss_that_the_script_holds_keeps_no_bytes_of_its_step() -> None:
    first = framed(Chain(), "1GiB")
    steps(first, 1, ROWS)
    needs = memory_of(first).needs
    assert needs is not None
    module = framed(Chain(), f"{int(1.02 * needs.baseline_bytes)}B")
    losses = []
    for step in range(6):
        losses.append(loss_of(module, step, ROWS))
        losses[-1].backward()
    assert all(each.is_kept for each in memory_of(module).room.decision.values())
    assert memory_of(module).log.counts.num_dropped == 0
