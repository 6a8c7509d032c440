"""Scripts whose loops are out of the ordinary, as people write them, plain and wrapped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional as F
from twice import Numbers, Script, Wrap, differences, numbers_of, stepped, wrapped

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


@made_of(
    lambda: {"first": nn.LSTMCell(1, 12), "second": nn.LSTMCell(12, 12), "linear": nn.Linear(12, 1)}
)
class Sequence2(nn.Module):
    """Two cells over time, and the future from its own outputs."""

    def forward(self, series: Tensor, future: int = 0) -> Tensor:
        h1, c1, h2, c2 = (torch.zeros(series.size(0), 12, dtype=series.dtype) for _ in range(4))
        outputs = []
        for value in series.split(1, dim=1):
            h1, c1 = self.first(value, (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            outputs.append(self.linear(h2))
        for _ in range(future):
            h1, c1 = self.first(outputs[-1], (h1, c1))
            h2, c2 = self.second(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def time_sequence_by_lbfgs(wrap: Wrap) -> Numbers:
    model = wrap(Sequence2().double())
    waves = torch.sin(torch.arange(9.0).double() / 2 + torch.rand(4, 1).double() * 6)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
        with torch.no_grad():
            prediction = model(waves[:1, :-1], future=3)
    return [*losses, prediction, model]


class GraphNet(nn.Module):
    """Sums over neighbours; graphs of other sizes at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(3)])
        self.out = nn.Linear(16, 2)

    def forward(self, x: Tensor, edges: Tensor, degree: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            sums = torch.zeros_like(x).index_add(0, edges[1], layer(x)[edges[0]])
            x = x + F.relu(norm(sums / degree.unsqueeze(1)))
        index = torch.zeros(1, x.size(1), dtype=torch.long)
        return self.out(torch.zeros(1, 16).scatter_add(0, index.expand(1, 16), x[:1])) + self.out(
            x.mean(0, keepdim=True)
        )


def graphs(wrap: Wrap) -> Numbers:
    model = wrap(GraphNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def losses() -> Iterator[Tensor]:
        for nodes, num_edges in [(9, 30), (7, 20), (12, 33), (9, 30)]:
            edges = torch.randint(nodes, (2, num_edges))
            degree = torch.bincount(edges[1], minlength=nodes).clamp(min=1).float()
            yield F.cross_entropy(model(torch.randn(nodes, 3), edges, degree), torch.tensor([1]))

    return [*stepped(optimizer, losses()), model]


@pytest.mark.parametrize(
    "script",
    [reinforce, time_sequence_by_lbfgs, graphs],
)
def test_a_script_logs_and_trains_the_same_numbers(script: Script) -> None:
    assert differences(script) == []


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


def inner_and_outer(wrap: Wrap) -> Numbers:
    """First-order MAML: inner steps on copies of the weights, an outer step on the weights."""
    model = wrap(nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(),
                               nn.Linear(24, 1)))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def losses() -> Iterator[Tensor]:
        for _ in range(3):
            weights = dict(model.named_parameters())
            for _ in range(2):
                loss = functional_call(model, weights, (torch.randn(5, 4),)).square().mean()
                slopes = torch.autograd.grad(loss, list(weights.values()))
                weights = {
                    name: weight - 0.1 * slope
                    for (name, weight), slope in zip(weights.items(), slopes, strict=True)
                }
            yield functional_call(model, weights, (torch.randn(5, 4),)).square().mean()

    return [*stepped(optimizer, losses()), model]


def test_weights_given_to_a_call_get_their_gradients_returned() -> None:
    with pytest.raises(RockmateError, match='gradients="returned"'):
        numbers_of(inner_and_outer, wrapped)
    returned = lambda model: wrapped(model, gradients="returned")  # noqa: E731
    assert differences(inner_and_outer, returned) == []
