"""Steps that are functions: penalties, forces, several models. Same numbers, time and peaks.

    taskset -c 0 python -m bench.steps            # writes bench/results/steps_cpu_<yyyymm>.*
    python -m bench.steps --model pinn --tiny

Each step is run as it is and as `rockmate.plan_step` plans it, or `rockmate.wrap_trainer` the
trainers of TRL, at 0.6 of the peak that eager's step has as measured, and with the smallest peak.

Trainers are those of tests/support/trl_trainers.py: `pip install trl datasets peft`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import command
from bench.command import Record
from bench.measure import allocator_peak, gradients_of, same_bits, time_in_turn
from bench.models.hf import hf
from bench.pages import about, filled
from rockmate import plan_step, wrap_trainer

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


def _gpt2(num_words: int) -> Any:
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 2, "n_positions": 128}
    return hf("GPT2LMHeadModel", vocab_size=num_words, **sizes)


def _log_probs(model: nn.Module, words: Tensor) -> Tensor:
    """Of each sequence's words, computed of what the model returns."""
    logits = model(input_ids=words, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, words[:, 1:, None]).sum((1, 2))


def dpo(size: int) -> Case:
    """A GPT-2 and its reference, log-probabilities outside of the models."""
    policy = _gpt2(1600 * size)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)

    def loss_fn(words: Tensor) -> Tensor:
        with torch.no_grad():
            expected = _log_probs(reference, words)
        chosen, rejected = (_log_probs(policy, words) - expected).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    words = torch.randint(policy.config.vocab_size, (4, 4 * size))
    return Case(loss_fn, [policy, reference], (words,))


def distillation(size: int) -> Case:
    """A student, a projection of its states, and a frozen teacher of its logits and states."""
    student, teacher = _gpt2(1600 * size), _gpt2(1600 * size).eval().requires_grad_(False)
    projection = nn.Linear(128, 128)

    def loss_fn(words: Tensor) -> Tensor:
        given = {"input_ids": words, "use_cache": False, "output_hidden_states": True}
        with torch.no_grad():
            told = teacher(**given)
        said = student(**given)
        states = F.mse_loss(projection(said.hidden_states[-1]), told.hidden_states[-1])
        log_probs = said.logits.log_softmax(-1).flatten(0, 1), told.logits.softmax(-1).flatten(0, 1)
        return F.kl_div(*log_probs, reduction="batchmean") + states

    words = torch.randint(student.config.vocab_size, (4, 4 * size))
    return Case(loss_fn, [student, projection, teacher], (words,))


def sft(size: int, *, is_inside: bool) -> Case:
    """A large vocabulary, its loss in the model or of the logits that the model returns."""
    model = _gpt2(4700 * size)

    def loss_fn(words: Tensor) -> Tensor:
        if is_inside:
            return model(input_ids=words, labels=words, use_cache=False).loss
        return -_log_probs(model, words).mean() / (words.shape[1] - 1)

    return Case(loss_fn, [model], (torch.randint(model.config.vocab_size, (4, 4 * size)),))


CASES: dict[str, Callable[[int], Case]] = {
    **{each.__name__: each for each in (pinn, wgan_gp, r1, maml, forces, dpo, distillation)},
    "sft_inside": partial(sft, is_inside=True),
    "sft_outside": partial(sft, is_inside=False),
}
TRAINERS = {
    f"TRL {kind}{' LoRA' if adapters else ''}": (kind, adapters)
    for kind in ("SFT", "DPO", "KTO", "ORPO", "Reward", "GKD", "GRPO")
    for adapters in (("", "new") if kind in ("DPO", "KTO") else ("",))
}


class Step:
    """A step that is measured: its model, and what computes the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        self.model, self.loss = model, loss

    def run(self) -> dict[str, Tensor]:
        """Gradients and loss of one step."""
        torch.manual_seed(1)
        self.model.zero_grad(set_to_none=False)
        loss = self.loss()
        loss.backward()
        return gradients_of(self.model) | {"loss": loss.detach()}

    def peak_bytes(self) -> int:
        """Of a second step, with gradients in place."""
        self.run()
        return allocator_peak(lambda: self.loss().backward())


def _of_function(case: Case, budget: Any, **options: Any) -> Step:
    function: Any = case.loss_fn
    if budget is not None:
        function = plan_step(function, case.modules, case.batch, budget=budget, **options)
    return Step(nn.ModuleList(case.modules), lambda: function(*case.batch))


def _of_trainer(name: str, size: int, budget: Any, **options: Any) -> Step:
    """Of a Llama, on 8 rows; without what GRPO generates."""
    kind, adapters = TRAINERS[name]
    widths = {"vocab_size": 128 * size, "hidden_size": 4 * size, "intermediate_size": 8 * size}
    sizes = {**widths, "num_hidden_layers": 4, "max_position_embeddings": 64}
    rows = 4 if kind in ("DPO", "ORPO", "Reward") else 8
    with tempfile.TemporaryDirectory() as folder:
        made = command.of_tests("trl_trainers").trainer(
            kind, Path(folder), size=sizes, times=5, adapters=adapters,
            per_device_train_batch_size=rows,
        )  # fmt: skip
    made.current_gradient_accumulation_steps, model = 1, made.model  # as its train() does
    if budget is not None:
        wrap_trainer(made, budget, **options)
    torch.manual_seed(1)
    batch = made._prepare_inputs(next(iter(made.get_train_dataloader())))
    return Step(model, lambda: made.compute_loss(made.model, dict(batch)))


def measured(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """One step: bits, time and peaks."""
    if name in TRAINERS and not all(map(find_spec, ("trl", "datasets", "peft"))):
        command.say(f"{name} is left out: TRL, datasets or PEFT is not installed")
        return
    torch.manual_seed(0)
    size = 1 if options.tiny else 32
    make: Any = partial(_of_trainer, name, size)
    if name in CASES:
        make = partial(_of_function, CASES[name](size))
    eager = make(None)
    eager_bytes = eager.peak_bytes()
    options_of: Any = {"trial": "never", "on_infeasible": "least"}
    step = make(int(SHARE * eager_bytes), numerics="bitwise", **options_of)
    least = make("1KiB", **options_of)
    for each in (step, least):
        each.run()  # in frames, for trainers: this file has the word create_graph
    is_same = same_bits(step.run(), eager.run())
    times = time_in_turn({"eager": eager.run, "planned": step.run}, options.rounds)
    yield {
        "model": name,
        "eager_bytes": eager_bytes,
        "peak_bytes": step.peak_bytes(),
        "least_bytes": least.peak_bytes(),
        "is_same": is_same,
        "time_ratio": times["planned"].ratio,
    }


def page(records: Sequence[Record]) -> list[str]:
    """The page of all records."""
    lines = command.newest(records, "model")
    return filled("steps", lines=lines, share=SHARE, most=MOST_TIME, about=about(lines, __doc__))


main = command.main_of(
    "steps", __doc__, measured, page, models=(*CASES, *TRAINERS), rounds=9, tiny=True,
    stem="steps_cpu",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
