"""A fake layout that is not the kernel's: the capture is repeated on the kernel's, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_alike, differing, gradients_of
from made_of import made_of
from torch import Tensor, nn
from torch.nn import functional

from rockmate import RockmateModule
from rockmate.errors import KernelLayoutError
from rockmate.ops import kernel_layouts

CHANNELS_LAST = torch.channels_last


@pytest.fixture(autouse=True)
def nothing_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(kernel_layouts, "_observed", {})
    monkeypatch.setattr(kernel_layouts, "_corrected", {})


@pytest.fixture
def lying_op() -> Iterator[Any]:
    """An op whose kernel transposes memory, and whose fake kernel says that it does not."""

    @torch.library.custom_op("rockmate_tests::turned", mutates_args=())
    def turned(x: Tensor) -> Tensor:
        return (x * 2).t().contiguous().t()

    @turned.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2

    turned.register_autograd(backward)
    return turned


@made_of(lambda turned: {"turned": turned, "first": nn.Linear(8, 6), "last": nn.Linear(6, 4)})
class Turning(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.turned(self.first(x).tanh())
        return self.last(hidden * hidden.sigmoid()).square().mean()


def assert_as_eager(model: nn.Module, *args: Any, budget: float = 1.0) -> None:
    model(*args).backward()
    expected = gradients_of(model)
    assert len(expected) == len(list(model.parameters()))
    module = RockmateModule(model, args, budget, numerics="bitwise")
    for _ in range(2):
        model.zero_grad()
        module(*args).backward()
        assert not differing(gradients_of(model), expected)


def test_an_op_whose_fake_kernel_lies(lying_op: Any) -> None:
    assert_as_eager(Turning(lying_op), torch.randn(16, 8))


class Images(nn.Module):
    """Norms of channels-last maps, also of one pixel, behind which memory orders count."""

    def __init__(self, norm: nn.Module, *, pooled: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm
        self.dropout, self.head = nn.Dropout(0.5), nn.Conv2d(8, 4, 1)
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = functional.adaptive_avg_pool2d(x, 1) if self.pooled else x
        x = self.head(self.dropout(functional.relu(self.norm(x))))
        return x.reshape(len(x), -1).square().mean()


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(4, 8)])
def test_norms_of_channels_last_maps(norm: nn.Module, pooled: bool) -> None:
    model = Images(norm, pooled=pooled)
    model.to(memory_format=CHANNELS_LAST)  # pyright: ignore[reportCallIssue]
    x = torch.randn(4, 3, 6, 6).to(memory_format=CHANNELS_LAST)
    state = torch.get_rng_state()
    losses = []
    module: Any = model
    for _ in range(2):
        torch.set_rng_state(state)
        model.zero_grad()
        loss = module(x)
        loss.backward()
        losses.append([loss.detach(), *(each.grad for each in model.parameters())])
        module = RockmateModule(model, x, 1.0, numerics="bitwise")
    assert_alike(*losses)


def test_norms_and_pointwise_ops_of_channels_last_maps() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Hardswish(), nn.Conv2d(8, 4, 1), nn.Flatten(2)
    )
    model.to(memory_format=CHANNELS_LAST)  # pyright: ignore[reportCallIssue]

    @made_of(lambda: {"model": model})
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.model(x).transpose(1, 2)
            return functional.log_softmax(scores, -1)[..., 0].mean()

    assert_as_eager(Loss(), torch.randn(4, 3, 6, 6).to(memory_format=CHANNELS_LAST))


def test_one_that_a_second_capture_does_not_correct_is_refused(
    lying_op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_layouts, "_in_observed_layout", lambda *_: None)
    with pytest.raises(KernelLayoutError, match=r"turned.*register_fake.*untraced"):
        RockmateModule(Turning(lying_op), torch.randn(16, 8), 1.0)
