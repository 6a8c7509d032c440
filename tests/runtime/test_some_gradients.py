"""`torch.autograd.grad` and `backward(inputs=...)`: inputs' gradients alone, as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import differing, gradients_of
from torch import Tensor, nn

from rockmate import BackwardError, RockmateModule


class Tower(nn.Module):
    """A float input beside tokens: dense, sliced and embedding gradients of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return (self.layers(x + self.embedding(tokens)) * x).sum()


def batch(*, requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 16, 32, generator=generator)
    return x.requires_grad_(requires_grad), torch.randint(64, (4, 16), generator=generator)


def expected() -> Tensor:
    x, tokens = batch()
    return torch.autograd.grad(Tower()(x, tokens), [x])[0]


@pytest.mark.parametrize("sample", ["with", "without", "none"])
@pytest.mark.parametrize("budget", [1.0, 0.7])
def test_grad_of_an_input_by_default(sample: str, budget: float) -> None:
    """Whether or not the input of the sample requires a gradient."""
    model = Tower()
    given = None if sample == "none" else batch(requires_grad=sample == "with")
    module = RockmateModule(model, given, budget)
    x, tokens = batch()
    (found,) = torch.autograd.grad(module(x, tokens), [x])
    assert torch.equal(found, expected())
    assert x.grad is None
    assert not gradients_of(model)


def test_what_is_computed_from_the_input_before_the_step() -> None:
    """A plain encoder: its weight is asked for, through the planned module."""
    encoder, model = nn.Linear(32, 32), Tower()
    reference = copy.deepcopy(model)
    x, tokens = batch(requires_grad=False)
    module = RockmateModule(model, (encoder(x), tokens), 1.0)
    (found,) = torch.autograd.grad(module(encoder(x), tokens), [encoder.weight])
    (theirs,) = torch.autograd.grad(reference(encoder(x), tokens), [encoder.weight])
    assert torch.equal(found, theirs)
    assert not gradients_of(model)


def test_backward_with_inputs_accumulates_there_alone() -> None:
    model = Tower()
    module = RockmateModule(model, batch(), 1.0)
    x, tokens = batch()
    module(x, tokens).backward(inputs=[x])
    assert x.grad is not None
    assert torch.equal(x.grad, expected())
    assert not gradients_of(model)


def test_a_whole_backward_may_follow() -> None:
    model, eager = Tower(), Tower()
    module = RockmateModule(model, batch(), 1.0)
    x, tokens = batch()
    loss = module(x, tokens)
    (found,) = torch.autograd.grad(loss, [x], retain_graph=True)
    assert torch.equal(found, expected())
    loss.backward()
    eager(*batch()).backward()
    assert not differing(gradients_of(model), gradients_of(eager))


def test_a_frozen_model() -> None:
    model = Tower().requires_grad_(False)
    module = RockmateModule(model, batch(), 1.0)
    x, tokens = batch()
    assert torch.equal(torch.autograd.grad(module(x, tokens), [x])[0], expected())


@pytest.mark.parametrize("allow_unused", [False, True])
@pytest.mark.parametrize("with_input", [False, True])
def test_parameters_are_refused_and_returned_if_asked_so(
    allow_unused: bool, with_input: bool
) -> None:
    """Never None for a parameter that has a gradient; the advice leads to eager's."""
    model, eager = Tower(), Tower()
    x, tokens = batch()
    wanted = [model.layers[0].weight, *([x] if with_input else [])]
    module = RockmateModule(model, batch(), 1.0)
    with pytest.raises(BackwardError, match='gradients="returned"'):
        torch.autograd.grad(module(x, tokens), wanted, allow_unused=allow_unused)
    assert not gradients_of(model)
    module = RockmateModule(model, batch(), 1.0, gradients="returned")
    found = torch.autograd.grad(module(x, tokens), wanted, allow_unused=allow_unused)
    theirs = torch.autograd.grad(eager(x, tokens), [eager.layers[0].weight, x])
    assert all(map(torch.equal, found, theirs))


def test_hooks_of_parameters_need_gradients_returned() -> None:
    model = Tower()
    seen: list[Tensor] = []
    model.layers[0].weight.register_hook(seen.append)
    x, tokens = batch()
    module = RockmateModule(model, batch(), 1.0)
    with pytest.raises(BackwardError, match=r'hooks.*gradients="returned"'):
        torch.autograd.grad(module(x, tokens), [x])
    module = RockmateModule(model, batch(), 1.0, gradients="returned")
    assert torch.equal(torch.autograd.grad(module(x, tokens), [x])[0], expected())
    assert not seen
