"""Steps that are functions: penalties, forces, several models. Same numbers, time and peaks.

    taskset -c 0 python -m bench.steps            # writes bench/results/steps_cpu_<yyyymm>.*
    python -m bench.steps --model pinn --tiny

Each step is run as it is and as `rockmate.plan_step` plans it, at 0.6 of the peak that eager's step
has as measured, and with the smallest peak.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import command
from bench.command import Record
from bench.measure import allocator_peak, gradients_of, same_bits, time_in_turn
from bench.pages import about, filled
from rockmate import plan_step

SHARE = 0.6
MOST_TIME = 1.15


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        loss_fn: the function.
        modules: what it calls.
        batch: its arguments.
    """

    loss_fn: Callable[..., Tensor]
    modules: list[nn.Module]
    batch: tuple[Tensor, ...]


def _mlp(num_in: int, num_out: int, width: int, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(num_in, width), activation()]
    for _ in range(3):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, num_out))


def pinn(size: int) -> Case:
    """The heat equation."""
    network = _mlp(2, 1, 128)

    def residual(points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(network(points).sum(), points, create_graph=True)
        (curved,) = torch.autograd.grad(slopes[:, 1].sum(), points, create_graph=True)
        return (slopes[:, 0] - curved[:, 1]).square().mean()

    return Case(residual, [network], (torch.rand(64 * size, 2),))


def wgan_gp(size: int) -> Case:
    """A critic's step with a gradient penalty."""
    generator, critic = _mlp(16, 64, 128, nn.ReLU), _mlp(64, 1, 256, nn.GELU)

    def loss_fn(noise: Tensor, real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(noise)
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        gap = critic(fake).mean() - critic(real).mean()
        return gap + 10 * (slope.norm(dim=1) - 1).square().mean()

    batch = torch.randn(32 * size, 16), torch.randn(32 * size, 64)
    return Case(loss_fn, [generator, critic], batch)


def r1(size: int) -> Case:
    """A convolutional critic's step with a penalty on real images."""
    widths = (3, 32, 64, 64)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.SiLU())
        for a, b in itertools.pairwise(widths)
    ]
    critic = nn.Sequential(*blocks, nn.Flatten(), nn.LazyLinear(1))
    critic(torch.randn(1, 3, 32, 32))

    def loss_fn(real: Tensor, fake: Tensor) -> Tensor:
        real = real.detach().requires_grad_()
        score = critic(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        loss = F.softplus(critic(fake)).mean() + F.softplus(-score).mean()
        return loss + 5 * slope.square().sum((1, 2, 3)).mean()

    return Case(loss_fn, [critic], tuple(torch.randn(2, size, 3, 32, 32)))


def maml(size: int) -> Case:
    """An outer loss behind one inner step."""
    learner = _mlp(8, 1, 128)

    def loss_fn(x: Tensor, y: Tensor, x_query: Tensor, y_query: Tensor) -> Tensor:
        weights = dict(learner.named_parameters())
        inner = F.mse_loss(learner(x), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        pairs = zip(weights.items(), slopes, strict=True)
        fast = {name: weight - 0.1 * slope for (name, weight), slope in pairs}
        return F.mse_loss(torch.func.functional_call(learner, fast, (x_query,)), y_query)

    return Case(loss_fn, [learner], tuple(torch.randn(64 * size, width) for width in (8, 1, 8, 1)))


def forces(size: int) -> Case:
    """Energy and forces of pairs of atoms, as in MACE's loop."""
    radial, node = _mlp(1, 32, 64, nn.SiLU), _mlp(32, 1, 64, nn.SiLU)

    def loss_fn(positions: Tensor, energy: Tensor, expected: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        apart = positions.unsqueeze(1) - positions.unsqueeze(0)
        distance = (apart.square().sum(-1, keepdim=True) + 1e-3).sqrt()
        found = node(radial(distance).sum(1)).sum()
        (slope,) = torch.autograd.grad(found, positions, create_graph=True)
        return (found - energy).square() + 10 * (slope + expected).square().mean()

    batch = torch.randn(2 * size, 3), torch.tensor(0.0), torch.randn(2 * size, 3)
    return Case(loss_fn, [radial, node], batch)


def dpo(size: int) -> Case:
    """A GPT-2 and its reference, log-probabilities outside of the models."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1600 * size, n_layer=2, n_embd=128, n_head=2, n_positions=128)
    policy = GPT2LMHeadModel(config)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    policy.train()

    def log_probs(model: nn.Module, words: Tensor) -> Tensor:
        logits = model(input_ids=words, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, words[:, 1:, None]).sum((1, 2))

    def loss_fn(words: Tensor) -> Tensor:
        with torch.no_grad():
            expected = log_probs(reference, words)
        chosen, rejected = (log_probs(policy, words) - expected).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    words = torch.randint(config.vocab_size, (4, 4 * size))
    return Case(loss_fn, [policy, reference], (words,))


CASES = {each.__name__: each for each in (pinn, wgan_gp, r1, maml, forces, dpo)}


def measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """One step: bits, time and peaks."""
    torch.manual_seed(0)
    case = CASES[name](1 if options.tiny else 32)
    model = nn.ModuleList(case.modules)

    def run(function: Callable[..., Any]) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=False)
        loss = function(*case.batch)
        loss.backward()
        return gradients_of(model) | {"loss": loss.detach()}

    def peak_bytes(function: Callable[..., Any]) -> int:
        run(function)
        return allocator_peak(lambda: function(*case.batch).backward())

    eager_bytes = peak_bytes(case.loss_fn)
    options_of: Any = {"trial": "never", "on_infeasible": "least", "numerics": "bitwise"}
    given = case.loss_fn, case.modules, case.batch
    step = plan_step(*given, budget=int(SHARE * eager_bytes), **options_of)
    least = plan_step(*given, budget="1KiB", **options_of | {"numerics": "any_order"})
    steps = {"eager": lambda: run(case.loss_fn), "planned": lambda: run(step)}
    is_same = same_bits(run(step), run(case.loss_fn))
    times = time_in_turn(steps, options.rounds)
    yield {
        "model": name,
        "eager_bytes": eager_bytes,
        "peak_bytes": peak_bytes(step),
        "least_bytes": peak_bytes(least),
        "is_same": is_same,
        "time_ratio": times["planned"].ratio,
    }


def page(records: Sequence[Record]) -> list[str]:
    """The page of all records."""
    lines = command.newest(records, "model")
    return filled("steps", lines=lines, share=SHARE, most=MOST_TIME, about=about(lines, __doc__))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    shared: dict[str, Any] = {"models": CASES, "rounds": 9, "tiny": True, "stem": "steps_cpu"}
    return command.run_models("steps", __doc__, arguments, measured, page, **shared)[0]


if __name__ == "__main__":
    sys.exit(main())
