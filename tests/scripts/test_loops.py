"""Scripts whose loops are out of the ordinary, as people write them, plain and wrapped."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twice import Numbers, Wrap, differences, numbers_of, wrapped

from rockmate.errors import RockmateError


class Policy(nn.Module):
    """A policy, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.Linear(4, 32)
        self.dropout = nn.Dropout(p=0.6)
        self.action, self.value = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.dropout(self.affine(x)))
        return F.softmax(self.action(x), dim=-1), self.value(x)


class Pole:
    """A pole on a cart, roughly; an episode ends when it has fallen."""

    def __init__(self) -> None:
        self.state = torch.zeros(4)

    def reset(self) -> Tensor:
        self.state = 0.05 * torch.randn(4)
        return self.state

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        position, speed, angle, turn = self.state.tolist()
        force = 1.0 if action else -1.0
        speed, turn = speed + 0.1 * force, turn + 0.2 * math.sin(angle) - 0.15 * force
        self.state = torch.tensor([position + 0.1 * speed, speed, angle + 0.1 * turn, turn])
        return self.state, 1.0, abs(angle) > 0.2


def discounted(rewards: list[float]) -> Tensor:
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    result = torch.tensor(returns)
    return (result - result.mean()) / (result.std() + 1e-6)


def reinforce(wrap: Wrap) -> Numbers:
    """As many calls as the episode has steps, before one backward of actions and of values."""
    model, world = wrap(Policy()), Pole()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    lengths = []
    for _ in range(4):
        state, saved, rewards, done = world.reset(), [], [], False
        while not done and len(rewards) < 12:
            probabilities, value = model(state.unsqueeze(0))
            choice = Categorical(probabilities)
            action = choice.sample()
            saved.append((choice.log_prob(action), value))
            state, reward, done = world.step(int(action))
            rewards.append(reward)
        returns = discounted(rewards)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for (log_probability, value), back in zip(saved, returns, strict=True):
            loss = loss - log_probability * (back - value.item())
            loss = loss + F.smooth_l1_loss(value, back.reshape(1, 1))
        loss.sum().backward()
        optimizer.step()
        lengths.append(float(len(rewards)))
    return [*lengths, model]


def test_a_script_logs_and_trains_the_same_numbers() -> None:
    assert differences(reinforce) == []


def per_sample_gradients(model: nn.Module) -> list[Tensor]:
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x.unsqueeze(0),)).square().sum()

    rows = torch.arange(24.0).reshape(3, 8) / 24
    return list(vmap(grad(loss), in_dims=(None, 0))(parameters, rows).values())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch.func.jvp
@pytest.mark.parametrize("mode", ["plan", "frames"])
@pytest.mark.parametrize("is_planned", [False, True])
def test_transforms_are_refused_and_run_on_the_plain_model(mode: str, is_planned: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    module = wrapped(model, mode=mode)
    if is_planned:
        module(torch.randn(3, 8)).sum().backward()
    x = torch.randn(2, 8)
    transforms: list[Callable[[nn.Module], object]] = [
        per_sample_gradients, lambda each: vmap(each)(x), lambda each: jacrev(each)(x),
        lambda each: jvp(each, (x,), (x,)),
    ]  # fmt: skip
    for transform in transforms:
        with pytest.raises(RockmateError, match=r"torch\.func\.\w+, .* Transform module\.original"):
            transform(module)
        transform(module.original)
    ours, plain = per_sample_gradients(module.original), per_sample_gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("mode", ["plan", "frames", "auto"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_module_is_refused(mode: str, use_reentrant: bool) -> None:
    module, x = wrapped(nn.Linear(8, 2), mode=mode), torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RockmateError, match=r"Or checkpoint module\.original"):
        checkpoint(module, x, use_reentrant=use_reentrant).sum().backward()
    checkpoint(module.original, x, use_reentrant=use_reentrant).sum().backward()
    module(x).sum().backward()


def inner_and_outer(wrap: Wrap) -> Numbers:
    """First-order MAML: inner steps on copies of the weights, an outer step on the weights."""
    model = wrap(nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(),
                               nn.Linear(24, 1)))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        weights = dict(model.named_parameters())
        for _ in range(2):
            loss = functional_call(model, weights, (torch.randn(5, 4),)).square().mean()
            slopes = torch.autograd.grad(loss, list(weights.values()))
            weights = {
                name: weight - 0.1 * slope
                for (name, weight), slope in zip(weights.items(), slopes, strict=True)
            }
        loss = functional_call(model, weights, (torch.randn(5, 4),)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, model]


def test_weights_given_to_a_call_get_their_gradients_returned() -> None:
    with pytest.raises(RockmateError, match='gradients="returned"'):
        numbers_of(inner_and_outer, wrapped)
    returned = lambda model: wrapped(model, gradients="returned")  # noqa: E731
    assert differences(inner_and_outer, returned) == []
