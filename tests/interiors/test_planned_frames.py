"""Frames whose inside is captured: as eager, bit for bit, within the budget, or as in eager."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers import assert_trains_alike
from made_of import made_of, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rockmate import RockmateModule
from rockmate._torch.allocator import timeline
from rockmate.errors import BackwardError
from rockmate.frames.interiors.schedules import PlannedSchedules
from tests.frames.test_frames import framed

WIDTH = 32
ROWS = 96


@pytest.fixture(autouse=True)
def _schedules_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step runs by a schedule does not depend on what else the machine does."""
    take = PlannedSchedules.take
    free = lambda planned, **_: take(planned, eager_s=1.0, fastest_s=1.0)  # noqa: E731
    monkeypatch.setattr(PlannedSchedules, "take", free)


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.drop = norm(WIDTH), nn.Dropout(0.2)
        self.layers = mlp(WIDTH, 8 * WIDTH, nn.GELU(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.layers(self.norm(x)))


class Net(nn.Module):
    """Blocks, of which chance leaves some out."""

    def __init__(self, blocks: list[nn.Module] | None = None, dropped: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)] if blocks is None else blocks)
        self.head = nn.Linear(WIDTH, 3)
        self.dropped = dropped

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) >= self.dropped:
                x = block(x)
        return self.head(x)


def num_planned(module: RockmateModule) -> int:
    """How many frames of the last call ran a schedule."""
    assert module.frames is not None
    return module.frames.counts.num_planned


def loss_of(module: nn.Module, seed: int) -> Tensor:
    return module(torch.randn(ROWS, WIDTH)).square().mean()


def check(
    model: nn.Module, budget: float = 0.5, loss: Callable[..., Any] = loss_of, num_steps: int = 9
) -> RockmateModule:
    """Trains a model and a copy of it, which has to give the same."""
    plain, module = copy.deepcopy(model), framed(model, budget)
    assert_trains_alike(module, plain, loss, num_steps)
    return module


@pytest.mark.parametrize("budget", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_equal_to_eager(norm: Callable[[int], nn.Module], budget: float) -> None:
    module = check(Net([Block(norm) for _ in range(6)]), budget)
    loss_of(module, 9).backward()
    torch.manual_seed(3)  # a step with many blocks
    _ = module(torch.randn(ROWS, WIDTH))
    assert num_planned(module) > 0 or budget == 1.0


def test_the_peak_is_within_the_budget() -> None:
    for budget in (0.3, 0.45, 0.7):
        module = framed(Net(dropped=0.0), budget)
        for seed in range(6):
            loss_of(module, seed).backward()
        assert num_planned(module) > 0
        assert module.frames is not None
        assert module.frames.budget_bytes is not None
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH)
        peak = timeline(lambda module=module, x=x: module(x).square().mean().backward()).peak_bytes
        assert peak <= module.frames.budget_bytes
        assert peak > 0.7 * module.frames.budget_bytes  # what there is is used


class Memory(nn.Module):
    """Reads a memory several times."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rest = mlp(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mixed = torch.softmax(x @ self.keys(memory).T, -1) @ self.values(memory)
        return x + self.rest(mixed + x)


class Decoder(nn.Module):
    """Blocks that all read what comes from the encoder, as others do."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Memory() for _ in range(5))
        self.shared = Memory()

    def forward(self, x: Tensor) -> Tensor:
        memory = self.inlet(x).sin()
        aside = memory.exp().mean(0)
        for block in self.blocks:
            x = self.shared(block(x, memory), memory)
        return x + memory * aside


def test_gradients_of_what_many_read_are_added_up_in_the_order_of_eager() -> None:
    module = check(Decoder(), 0.4)
    assert num_planned(module) > 0


def loss_of_words(module: nn.Module, _: int) -> Tensor:
    ids = torch.randint(4, 64, (8, 24))
    return module(input_ids=ids, labels=ids).loss


def test_a_decoder_of_transformers_with_layerdrop() -> None:
    config = transformers.M2M100Config(
        vocab_size=64, d_model=32, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=128,
        decoder_ffn_dim=128, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=32, encoder_layerdrop=0.2, decoder_layerdrop=0.2, use_cache=False,
    )  # fmt: skip

    module = check(transformers.M2M100ForConditionalGeneration(config).train(), 0.4, loss_of_words)
    assert num_planned(module) > 0


def test_without_planned_frames_all_run_as_in_eager() -> None:
    module = framed(Net(), plan_frames=False)
    for seed in range(6):
        loss_of(module, seed).backward()
    assert num_planned(module) == 0


@made_of(lambda: {"means": []})
class Appending(Block):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.means.append(result.detach().mean())
        return result


class Branching(Block):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if result.mean() > 0 else result.sin()


class Tied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8 * WIDTH, WIDTH)
        self.again.weight = self.layers[3].weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.again(self.layers[0](x))


@pytest.mark.parametrize("kind", [Appending, Branching, Tied])
def test_what_cannot_be_captured_runs_as_in_eager(kind: type[Block]) -> None:
    module = check(Net([kind() for _ in range(5)]))
    assert num_planned(module) == 0


FACTORS = {"scale": 1.0}
SEEN: list[Tensor] = []


def _scale() -> float:
    return FACTORS["scale"]


class ReadingGlobals(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * _scale()


class ChangingGlobals(Block):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.detach())
        return super().forward(x)


def test_globals_that_a_forward_reads_are_those_of_the_call() -> None:
    def loss(module: nn.Module, seed: int) -> Tensor:
        FACTORS["scale"] = 1.0 + seed // 6
        return loss_of(module, seed)

    model = Net([ReadingGlobals() for _ in range(5)], dropped=0.0)
    module = check(model, 0.3, loss, num_steps=10)
    FACTORS["scale"] = 1.0
    loss_of(module, 0).backward()
    assert num_planned(module) > 0


def test_a_forward_that_changes_a_global_runs_as_in_eager() -> None:
    module = check(Net([ChangingGlobals() for _ in range(5)]))
    assert num_planned(module) == 0
    assert all(type(each) is Tensor for each in SEEN)


def test_blocks_with_hooks_run_as_in_eager() -> None:
    model = Net()
    seen: list[Any] = []
    for block in model.blocks:
        block.layers[0].register_forward_hook(lambda *_: seen.append(1))
    module = check(model)
    assert num_planned(module) == 0
    assert seen


def _ready(budget: float = 0.3) -> tuple[RockmateModule, Net]:
    model = Net(dropped=0.0)
    module = framed(model, budget)
    for seed in range(5):
        loss_of(module, seed).backward()
        if seed == 1:  # insides are captured; times of the machine are not to decide
            frames: Any = module.frames
            for needs in frames.needs.by_key.values():
                needs.seconds = 1.0
    assert num_planned(module) == 6
    return module, model


@pytest.mark.parametrize("how", ["data", "changed in place"])
def test_a_parameter_that_is_changed_is_named(how: str) -> None:
    module, model = _ready()
    loss = module(torch.randn(ROWS, WIDTH)).mean()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if how == "data":
                parameter.data = parameter.data * 0.5
            else:
                parameter.mul_(0.5)
    with pytest.raises(BackwardError, match=rf"blocks\.5.*{how}.*keep=\['blocks\.5'\]"):
        loss.backward()


def test_modes_frozen_parameters_and_autocast_are_those_of_the_call() -> None:
    def loss(module: nn.Module, seed: int) -> Tensor:
        blocks: Any = module.get_submodule("blocks")
        blocks[1].drop.p = 0.5 if seed == 6 else 0.2
        blocks[2].requires_grad_(seed != 7)
        blocks[3].drop.train(seed != 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=seed == 9):
            return loss_of(module, seed)

    check(Net(dropped=0.0), loss=loss, num_steps=12)


def test_a_backward_under_autocast_of_a_forward_outside() -> None:
    def loss(module: nn.Module, seed: int) -> Tensor:
        value = loss_of(module, seed)
        with torch.autocast("cpu", torch.bfloat16):
            value.backward()
        return value.detach().requires_grad_()

    model = Net(dropped=0.0)
    module = RockmateModule(copy.deepcopy(model), None, 0.8, mode="frames")
    assert_trains_alike(module, model, loss, 7)


def test_two_forwards_before_a_backward_and_two_backwards() -> None:
    def loss(module: nn.Module, _: int) -> list[Tensor]:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        value = module(x).sin().mean() + module(x.detach()).square().mean()
        value.backward(retain_graph=True)
        return [value, x]

    check(Net(), loss=loss)


def test_a_checkpoint_around_a_block_keeps_it_as_it_is() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
            return self.head(x)

    module = check(Checkpointed())
    assert num_planned(module) == 3


def test_batches_of_sizes_that_come_again_are_planned() -> None:
    numbers: list[int] = []

    def loss(module: nn.Module, seed: int) -> Tensor:
        value = module(torch.randn(ROWS - 7 * (seed % 3), WIDTH)).square().mean()
        if isinstance(module, RockmateModule):
            numbers.append(num_planned(module))
        return value

    check(Net(dropped=0.0), 0.4, loss, num_steps=12)
    assert all(numbers[-3:]), numbers


def test_the_peak_of_a_smaller_batch_is_within_the_budget() -> None:
    model = Net(dropped=0.0)
    module = framed(model, 0.4)
    for seed in range(8):
        torch.manual_seed(seed)
        module(torch.randn(ROWS - 30 * (seed % 2), WIDTH)).square().mean().backward()
    assert module.frames is not None
    assert module.frames.budget_bytes is not None
    for rows in (ROWS, ROWS - 30):
        x = torch.randn(rows, WIDTH)
        peak = timeline(lambda x=x: module(x).square().mean().backward()).peak_bytes
        assert num_planned(module) > 0
        assert peak <= module.frames.budget_bytes


def test_statistics_are_updated_once_by_calls_of_both_kinds() -> None:
    """A plan's update is no write in place for autograd, as in eager, which holds them."""

    class Mixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x = torch.cat([block(x[: ROWS // 2 + 3]), x[ROWS // 2 + 3 :]])
            return self.head(x)

    check(Mixed([Block(nn.BatchNorm1d) for _ in range(4)]))


def test_a_second_derivative_is_refused() -> None:
    module, model = _ready()
    loss = module(torch.randn(ROWS, WIDTH)).mean()
    with pytest.raises(BackwardError, match=r"create_graph.* plan_frames=False,") as caught:
        loss.backward(create_graph=True)
    assert "keep=" not in str(caught.value)  # which all frames would need
    module = RockmateModule(model, None, 0.5, mode="frames", plan_frames=False)
    module(torch.randn(ROWS, WIDTH)).mean().backward(create_graph=True)


def test_hooks_of_parameters_are_called_in_the_order_of_eager() -> None:
    def loss(module: nn.Module, seed: int) -> list[Any]:
        called = lists.setdefault(id(module), [])
        if seed == 6:
            for place, each in enumerate(module.parameters()):
                each.register_post_accumulate_grad_hook(lambda _, place=place: called.append(place))
        return [loss_of(module, seed), called]

    lists: dict[int, list[int]] = {}
    check(Net(dropped=0.0), 0.4, loss)
    assert all(lists.values())


def test_hooks_of_all_modules_are_called() -> None:
    def loss(module: nn.Module, seed: int) -> Tensor:
        called: list[int] = []
        if seed <= 5:
            return loss_of(module, seed)
        handle = nn.modules.module.register_module_forward_hook(lambda *_: called.append(1))
        value = loss_of(module, seed)
        handle.remove()
        assert len(called) > 6 * len(list(module.get_submodule("blocks.0").modules())) - 1
        return value

    check(Net(dropped=0.0), 1.0, loss)


class Twice(Net):
    """Calls each block twice, and reads a weight of one."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        weight: Any = self.blocks[0].get_submodule("layers.3").weight
        return self.head(x) + nn.functional.linear(x.repeat(1, 8), weight).mean()


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("net", [Net, Twice])
def test_gradients_of_weights_that_autocast_has_cast_once(
    is_cached: bool, net: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def loss(module: nn.Module, seed: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            result = loss_of(module, seed)
        if isinstance(module, RockmateModule):
            counts.append(num_planned(module))
            found = module.frames and module.frames.needs
            for needs in found.by_key.values() if found else ():
                needs.seconds = 1.0  # so that a frame that is dropped whole is not the faster one
        return result

    monkeypatch.setitem(globals(), "ROWS", 1024)  # beside which casts of weights are small
    check(net([Block() for _ in range(3)], dropped=0.0), 0.5, loss)
    assert max(counts) > 0


class Product(nn.Module):
    """Reads its weight as autocast casts it, and further ways."""

    def __init__(self, further: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.further = nn.Parameter(torch.randn(WIDTH, WIDTH)), further
        self.ending = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        product = nn.functional.linear(x, self.weight)
        return self.ending(x + product + self.further(self.weight))


@pytest.mark.parametrize(
    ("further", "is_planned"),
    [
        (lambda weight: weight[0, 0].detach(), True),
        (lambda weight: weight.mean(), False),
        (lambda weight: weight.to(torch.bfloat16).mean(), False),
        (lambda weight: nn.functional.linear(weight, weight).mean(), False),
    ],
)
def test_a_weight_with_readers_beside_the_cast_of_autocast(
    further: Callable[[Tensor], Tensor], is_planned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(module: nn.Module, seed: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(module, seed)

    caplog.set_level(logging.INFO, "rockmate.frames.interiors")
    check(Net([Product(further) for _ in range(3)], dropped=0.0), 1.0, loss)
    assert ("is not planned" in caplog.text) != is_planned


@made_of(lambda counts: {"counts": counts})
class CountingOutside(Block):
    """Counts its calls in a list of its model."""

    def forward(self, x: Tensor) -> Tensor:
        self.counts.append(1)
        return super().forward(x)


def test_what_a_forward_leaves_in_a_list_comes_once() -> None:
    def loss(module: nn.Module, seed: int) -> list[Any]:
        return [loss_of(module, seed), module.get_submodule("blocks.0").counts]

    counts: list[int] = []
    check(Net([CountingOutside(counts) for _ in range(4)]), 1.0, loss)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_model_that_hands_its_cache_to_its_layers_is_told_once(
    use_cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=2, use_cache=use_cache
    )
    module = check(transformers.GPT2LMHeadModel(config).train(), 0.4, loss_of_words)
    assert use_cache or num_planned(module) > 0
    told = [each for each in caplog.records if "use_cache = False" in each.getMessage()]
    assert len(told) == int(use_cache)
