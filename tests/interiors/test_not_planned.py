"""What a captured inside cannot give back runs as in eager: lists, hooks, aliases."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trains_alike
from made_of import made_of, mlp
from torch import Tensor, nn

from rockmate import RockmateModule

WIDTH, ROWS = 16, 64


@made_of(lambda: {"norm": nn.LayerNorm(WIDTH), "body": mlp(WIDTH, 4 * WIDTH)})
class Block(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + self.body(self.norm(x))


@made_of(lambda block=Block: {"blocks": nn.ModuleList(block() for _ in range(4))})
class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plain_loss(module: nn.Module, _: int) -> list[Any]:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    return [module(x).square().mean(), x]


def check(
    chain: Chain,
    loss: Callable[..., Any] = plain_loss,
    *,
    is_planned: bool | None = False,
    **options: Any,
) -> None:
    """All numbers are eager's, and frames are planned in the end or not (None: either)."""
    other = copy.deepcopy(chain)
    module = RockmateModule(other, None, 0.5, mode="frames", on_infeasible="least", **options)
    assert_trains_alike(module, chain, loss, 8)
    assert module.frames is not None
    assert is_planned in (None, module.frames.counts.num_planned > 0)


def test_blocks_are_planned() -> None:
    check(Chain(), is_planned=True)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_of_others_are_drawn_as_often(draw: Callable[[], float]) -> None:
    class Drawing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(self.norm(x)) * draw()

    check(Chain(Drawing))


def test_a_dictionary_that_is_filled_again() -> None:
    class Filling(Block):
        def forward(self, x: Any) -> Tensor:
            x["x"] = x["x"] + self.body(self.norm(x["x"]))
            return x["x"]

    class Dictionary(Chain):
        def forward(self, x: Tensor) -> Tensor:
            values = {"x": x}
            for block in self.blocks:
                block(values)
            return values["x"]

    check(Dictionary(Filling))


def test_which_arguments_are_one_tensor() -> None:
    class Asking(Block):
        def forward(self, x: Tensor, one: Tensor, two: Tensor) -> Tensor:
            return x + self.body(self.norm(x)) * (2.0 if one is two else 1.0) + one.mean()

    class Pairs(Chain):
        number = 0

        def forward(self, x: Tensor) -> Tensor:
            one, two = torch.ones(3), torch.ones(3)
            for block in self.blocks:
                x = block(x, one, one if self.number > 4 else two)
            return x

    def loss(chain: Any, number: int) -> list[Any]:
        chain.number = number
        return plain_loss(chain, number)

    check(Pairs(Asking), loss)


def test_the_sign_of_a_zero() -> None:
    class Scaled(Block):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return x + self.body(self.norm(x)) * (1 / torch.full((1,), factor)).clamp(-1, 1)

    class Signs(Chain):
        factor = 0.0

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, self.factor)
            return x

    def loss(chain: Any, number: int) -> list[Any]:
        chain.factor = -0.0 if number > 4 else 0.0
        return plain_loss(chain, number)

    check(Signs(Scaled), loss)


@pytest.mark.parametrize("kind", ["same", "view"])
def test_outputs_that_share_memory(kind: str) -> None:
    class Sharing(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 0.5 + self.body(self.norm(x * 2))
            return y, (y if kind == "same" else y.view(-1))

    class Changing(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                y, other = block(x)
                y.add_(1.0)
                x = 0.3 * y + 0.3 * other.view_as(y) + (1.0 if other is y else 0.0)
            return x

    check(Changing(Sharing))


def test_hooks_that_a_forward_adds_to_tensors() -> None:
    @made_of(lambda: {"sums": []})
    class Noting(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = x + self.body(self.norm(x))
            y.register_hook(lambda gradient: self.sums.append(gradient.sum()))
            return y

    def loss(chain: Any, number: int) -> list[Any]:
        return [*plain_loss(chain, number), *(each.sums for each in chain.blocks)]

    check(Chain(Noting), loss)


@pytest.mark.parametrize("kind", ["block", "forward", "class", "inner"])
def test_another_block_or_forward(kind: str) -> None:
    class Other(Block):
        pass

    def doubled(block: Any, x: Tensor) -> Tensor:
        return x + 2 * block.body(block.norm(x))

    def loss(chain: Any, number: int) -> list[Any]:
        block: Any = chain.blocks[1]
        if number == 5 and kind == "block":
            torch.manual_seed(5)
            chain.blocks[1] = Other()
        elif number == 5 and kind == "forward":
            block.forward = lambda x: doubled(block, x)
        elif number == 5 and kind == "inner":
            block.norm.forward = lambda x: 2 * x
        elif kind == "class":
            forward: Any = doubled if number >= 5 else Block.forward
            Other.forward = forward
        return plain_loss(chain, number)

    check(Chain(Other), loss, is_planned=kind != "class")


@pytest.mark.parametrize("name", ["use_cache", "gradient_checkpointing"])
def test_switches_that_a_capture_turns_off(name: str) -> None:
    @made_of(lambda: {"config": SimpleNamespace(use_cache=False), "gradient_checkpointing": False})
    class Switched(Block):
        def forward(self, x: Tensor) -> Tensor:
            is_on = self.config.use_cache or self.gradient_checkpointing
            return x + self.body(self.norm(x)) * (2.0 if is_on else 1.0)

    def loss(chain: Any, number: int) -> list[Any]:
        for each in chain.blocks:
            setattr(each.config if name == "use_cache" else each, name, number > 4)
        return plain_loss(chain, number)

    check(Chain(Switched), loss)


def test_what_a_function_in_an_attribute_reads() -> None:
    factors = [1.0]

    @made_of(lambda: {"factor": lambda: factors[0]})
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(self.norm(x)) * self.factor()

    def loss(chain: Any, number: int) -> list[Any]:
        factors[0] = 2.0 if number > 4 else 1.0
        return plain_loss(chain, number)

    check(Chain(Scaled), loss)


FACTOR = 1.0


def test_a_global_that_no_name_tells_is_found_by_a_trial(caplog: pytest.LogCaptureFixture) -> None:
    """Frames are then planned no longer."""

    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(self.norm(x)) * globals()["FACTOR"]

    def loss(chain: Any, number: int) -> list[Any]:
        # Step 5 is one whose peak is measured.
        globals()["FACTOR"] = 2.0 if number > 5 else 1.0
        return plain_loss(chain, number)

    check(Chain(Scaled), loss, trial="always")
    assert "insides of frames are planned no longer, since the step in frames is not" in caplog.text


def test_blocks_and_layers_within_a_transform() -> None:
    class Mapped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.vmap(self.body)(self.norm(x)[:, None])[:, 0]

    class Mapping(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = 0.5 * block(x) + 0.5 * torch.vmap(block)(x[:, None])[:, 0]
            return x

    check(Chain(Mapped), is_planned=True)
    check(Mapping(), is_planned=None)  # what runs in the transform holds memory beside them
