"""Submodules that run as they are.

Recurrent layers, and those that the user names because they cannot be traced.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_alike, assert_gradients_alike
from made_of import made_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from rockmate import (
    BackwardError,
    InvalidSampleError,
    Plan,
    Planner,
    RockmateModule,
    UnsupportedModelError,
)
from rockmate._torch.allocator import timeline
from rockmate.planning.candidate import linspace_int

TOKENS = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(6, 16, generator=torch.Generator().manual_seed(2))


class Tagger(nn.Module):
    """Embedding, a recurrent layer of two levels with dropout, and a wide head."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.recur = kind(16, 16, 2, batch_first=True, dropout=0.2, bidirectional=True)
        wide = [
            layer for _ in range(4) for layer in (nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))
        ]
        self.head = nn.Sequential(nn.Dropout(0.1), *wide, nn.Linear(32, 50))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.recur(self.embed(tokens))
        return functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


class Halting(nn.Module):
    """Runs as many rounds as its input says, which no trace can follow."""

    def __init__(self, width: int = 16, *, normalizes: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, width),
            nn.BatchNorm1d(width) if normalizes else nn.Identity(),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.flatten()[0].item() > 0)):
            x = x + torch.tanh(self.inner(x))
        return x


class Tower(nn.Module):
    """A layer, the halting part once or twice, and a wide head."""

    def __init__(self, *, normalizes: bool = False, num_calls: int = 1) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.halting = Halting(normalizes=normalizes)
        self.head = nn.Sequential(
            nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4)
        )
        self.num_calls = num_calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(self.num_calls):
            x = self.halting(x)
        return self.head(x).square().mean()


def _trained(model: nn.Module, call: Callable[[], Tensor], seed: int) -> list[Tensor]:
    """Loss, gradients, buffers and random state after one step from the same weights."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = call()
    loss.backward()
    gradients = [torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [
        loss.detach().clone(),
        *gradients,
        *(buffer.clone() for buffer in model.buffers()),
        torch.get_rng_state(),
    ]


def _agree(
    model: nn.Module, planned: nn.Module, *inputs: Tensor, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Steps of both; but for the loss and the random state within the tolerance."""
    for seed in (1, 2, 3):
        start = {name: value.clone() for name, value in model.state_dict().items()}
        expected = _trained(model, lambda: model(*inputs), seed)
        model.load_state_dict(start)
        found = _trained(model, lambda: planned(*inputs), seed)
        torch.testing.assert_close(found[1:-1], expected[1:-1], rtol=rtol, atol=atol)
        assert_alike((found[0], found[-1]), (expected[0], expected[-1]))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("share", ["all", "least"])
def test_a_recurrent_layer_trains_as_in_eager_within_its_budget(
    kind: Callable[..., nn.RNNBase], share: str
) -> None:
    torch.manual_seed(0)
    model = Tagger(kind)
    planner = Planner(model, (TOKENS, TOKENS))
    plan = planner.plan(1.0 if share == "all" else planner.minimum_peak_bytes)
    planned = planner.module(plan.budget_bytes)
    _agree(model, planned, TOKENS, TOKENS)

    def step() -> None:
        planned(TOKENS, TOKENS).backward()

    step()
    assert timeline(step).peak_bytes <= plan.budget_bytes


def test_a_parameter_that_the_forward_writes_is_as_it_was_after_planning() -> None:
    class Normalized(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight.copy_(functional.normalize(self.head.weight) * 2)
            return super().forward(x)

    model = Normalized(nn.GRU)
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(UnsupportedModelError, match=r"changes the parameter head\.weight in place"):
        Planner(model, torch.randn(4, 6, 96))
    assert all(map(torch.equal, before, model.parameters()))


class Recurrent(nn.Module):
    """Recurrent layers whose last states nobody reads, and whose gradients come laid out in another
    way than what they return."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(96, 96, batch_first=True) for _ in range(3))
        self.head = nn.Linear(96, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)[0])
        return self.head(x).square().mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_the_backward_of_a_recurrent_layer_copies_counts(
    kind: Callable[..., nn.RNNBase],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64, 96)
    planner = Planner(Recurrent(kind), (x,))
    for budget_bytes in linspace_int(planner.minimum_peak_bytes, planner.baseline_peak_bytes, 4):
        planned = planner.module(budget_bytes)
        planned(x).backward()
        peak_bytes = timeline(partial(_step, planned, x)).peak_bytes
        assert peak_bytes <= budget_bytes
        if kind is nn.LSTM:  # the kernels of others leave much of what they save within chunks
            # The inputs of the last two layers count twice: the op before saves them as well.
            assert peak_bytes >= 0.98 * planned.plan.predicted_peak_bytes - 2 * x.nbytes


class Remembering(torch.autograd.Function):
    """Keeps its input where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.cos(ctx.x)


@made_of(lambda *, remembers: {"layer": nn.Linear(64, 64), "remembers": remembers})
class BlockNode(nn.Module):
    """Not traced in the test below.

    Saves its input, a view of it, its output, and values of its own.
    """

    def forward(self, x: Tensor) -> Tensor:
        own = torch.exp(0.1 * self.layer(x.view(-1, 64))).view_as(x)
        return torch.sigmoid(own * x) + (Remembering.apply(x) if self.remembers else 0.0)


class Parts(nn.Module):
    """Inputs of the parts that are read elsewhere too, so that a plan may drop them and make them
    again while a part's run is kept."""

    def __init__(self, *, remembers: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(BlockNode(remembers=remembers) for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            y = functional.gelu(x * 1.5)
            x = x + part(y) * torch.tanh(y)
        return self.head(x).square().mean()


@pytest.mark.parametrize("remembers", [False, True])
def test_what_a_part_saves_of_its_inputs_and_outputs_counts(remembers: bool) -> None:
    torch.manual_seed(0)
    model, x = Parts(remembers=remembers), torch.randn(8, 32, 64)
    planner = Planner(model, x, untraced=[f"parts.{index}" for index in range(3)])
    for budget_bytes in linspace_int(planner.minimum_peak_bytes, planner.baseline_peak_bytes, 6):
        planned = planner.module(budget_bytes)
        expected, found = (_trained(model, partial(one, x), 1) for one in (model, planned))
        assert torch.equal(expected[0], found[0])
        # Eager adds a part's shares in the gradient of y one by one.
        torch.testing.assert_close(found[1:], expected[1:], rtol=1e-4, atol=1e-7)
        peak_bytes = timeline(partial(_step, planned, x)).peak_bytes
        assert peak_bytes <= budget_bytes
        if not remembers:  # else what the plan saves for the part counts with the part as well
            assert peak_bytes >= 0.98 * planned.plan.predicted_peak_bytes


@made_of(lambda: {"enter": nn.Linear(16, 32), "complex": Complex(), "leave": nn.Linear(32, 1)})
class Spectral(nn.Module):
    """Complex numbers within real ones."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.complex(torch.view_as_complex(self.enter(x).unflatten(-1, (-1, 2))))
        return self.leave(torch.view_as_real(z).flatten(-2)).square().mean()


class Complex(nn.Module):
    """Saves its input as it is and conjugated, which is the same memory."""

    def forward(self, z: Tensor) -> Tensor:
        return z * z.conj() * z.sin()


class Selective(nn.Linear):
    """Its checkpoint saves what the product makes; the part returns a loss.

    Warnings are errors here, and PyTorch has one for hooks of the user around a checkpoint.
    """

    def forward(self, input: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        product = super().forward
        found: Any = checkpoint(
            lambda x: product(x).sin().exp(), input, use_reentrant=False, context_fn=contexts
        )
        return found.square().mean()


def test_eager_holds_no_less_than_the_plan_counts() -> None:
    torch.manual_seed(0)
    model, x = Parts(remembers=False), torch.randn(8, 32, 64)
    planner = Planner(model, x, untraced=[f"parts.{index}" for index in range(3)])
    model(x).backward()
    assert planner.baseline_peak_bytes <= 1.02 * timeline(partial(_step, model, x)).peak_bytes


def test_whole_graph_planning_takes_a_backward_that_releases_on_its_way() -> None:
    torch.manual_seed(0)
    part = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.Tanh())))
    model = nn.Sequential(nn.Linear(16, 256), part, nn.Linear(256, 1))
    planner = Planner(model, torch.randn(64, 16), untraced=["1"])
    assert any(cost.overhead_bytes < 0 for cost in planner.plan(1.0).costs.first)
    plan = planner.plan(1.0, strategy="checkmate")
    assert plan.predicted_peak_bytes <= planner.baseline_peak_bytes


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).backward()


class SettingUp(nn.Linear):
    """Finds its scale in its first call, and may count all."""

    scale, num_calls, counts = 0.0, 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.counts
        self.scale = self.scale or float(x.detach().abs().max())
        return super().forward(x / self.scale)


@pytest.mark.parametrize("counts", [False, True])
def test_a_submodule_may_run_again_if_only_its_first_call_sets_it_up(counts: bool) -> None:
    part = SettingUp(16, 16)
    part.counts = counts
    model = nn.Sequential(nn.Linear(16, 16), part, nn.Tanh(), nn.Linear(16, 4))
    plain = copy.deepcopy(model)
    planner = Planner(model, IMAGE, untraced=["1"])
    assert (part.scale, part.num_calls) == (0.0, 0)
    ops = planner.plan(1.0).snapshot.ops
    forward = next(op for op in ops if op.short_call == "untraced_forward")
    assert forward.is_recomputable != counts
    module = planner.module(1.0)
    for _ in range(2):
        for each in (module, plain):
            each(IMAGE).square().sum().backward()
    assert_gradients_alike(model, plain)


def halts(num_parts: int) -> nn.Module:
    """Several halting parts in a list within one submodule."""
    parts = nn.Sequential(*(Halting() for _ in range(num_parts)))
    return nn.Sequential(OrderedDict(inside=nn.Sequential(nn.Linear(16, 16), parts)))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            Tower(),
            r'run that submodule as it is: untraced=\["halting"\] \(on the command line: --untraced halting\)\. ',  # noqa: E501
        ),
        (halts(1), r'untraced=\["inside.1.0"\] \(.*\), or what contains it \("inside.1"\)'),
        (
            halts(2),
            r'and the others of its class Halting as they are: untraced=\["inside.1.0", "inside.1.1"\] \(',  # noqa: E501
        ),
        (
            halts(5),
            r'as they are: untraced=\["inside.1"\] \(on the command line: --untraced inside.1\)\. ',
        ),
    ],
)
def test_without_a_name_the_error_says_which(model: nn.Module, told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=told) as raised:
        Planner(model, IMAGE)
    (names,) = re.findall(r"--untraced ([\w.,]+)\)", str(raised.value))
    assert Planner(model, IMAGE, differentiable="all", untraced=names.split(",")).plan(1.0)


@made_of(lambda: {"linear": nn.Linear(16, 16)})
class SometimesDeep(nn.Module):
    """Saves more in some runs than in others, as drawn."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(torch.randint(1, 9, ()))):
            x = x + self.linear(x).tanh()
        return x


@pytest.mark.parametrize("seed", range(8))
def test_a_run_may_save_less_than_another(seed: int) -> None:
    model = nn.Sequential(nn.Linear(16, 16), SometimesDeep(), nn.Linear(16, 1))
    torch.manual_seed(seed)
    planner = Planner(model, IMAGE, untraced=["1"])
    assert planner.plan(1.0).predicted_peak_bytes == planner.baseline_peak_bytes


@pytest.mark.parametrize("normalizes", [False, True])
def test_a_named_submodule_follows_its_values(normalizes: bool) -> None:
    torch.manual_seed(0)
    model = Tower(normalizes=normalizes)
    before = [buffer.clone() for buffer in model.buffers()]
    planner = Planner(model, IMAGE, untraced=("halting",))
    assert_alike(before, model.buffers())
    planned = planner.module(planner.minimum_peak_bytes)
    for sign in (1.0, -1.0):
        _agree(model, planned, sign * IMAGE)
    calls = [op for op in planner.plan(1.0).snapshot.ops if op.short_call == "untraced_forward"]
    assert [(op.is_recomputable, op.is_random) for op in calls] == [(not normalizes, True)]


class Masking(Halting):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = super().forward(self.inner(x))
        return x if mask is None else mask * x


@made_of(lambda: {"conv": nn.Conv2d(8, 16, 1), "halting": Masking()})
class Masked(nn.Module):
    """The gradient of `conv` lies otherwise than its result; libraries make masks for compilers."""

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image).flatten(2).transpose(1, 2)
        mask = x.new_ones(len(x), 1, 1) if torch.compiler._is_compiling_flag else None
        return self.halting(x, mask).square().mean()


def test_a_submodule_that_is_called_twice_adds_up_its_gradients() -> None:
    torch.manual_seed(0)
    model = Tower(num_calls=2)
    planned = RockmateModule(model, IMAGE, 1.0, untraced=["halting"])
    # Eager adds up both calls' contributions one by one.
    _agree(model, planned, IMAGE, rtol=1e-6, atol=1e-8)


def test_the_wrapper_takes_the_names_and_frozen_parts_stay_without_gradient() -> None:
    torch.manual_seed(0)
    model = Tower()
    model.halting.requires_grad_(False)
    planned = RockmateModule(model, IMAGE, 1.0, untraced=["halting"])
    _agree(model, planned, IMAGE)
    assert model.halting.inner[0].weight.grad is None


def test_autocast_reaches_the_submodule_and_its_recomputation() -> None:
    """Its weights are used several times: with the cache, their gradients add up in bfloat16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), *(Halting() for _ in range(3)))
    image = torch.randn(64, 16)
    uncached = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    with uncached():
        planner = Planner(model, image, untraced=("1", "2", "3"))
        planned = planner.module(planner.minimum_peak_bytes)
    assert sum(row.num_recomputed for row in planned.plan.block_rows())
    for seed in range(3):
        expected = _trained(model, lambda: uncached()(model)(image).mean(), seed)
        assert_alike(_trained(model, lambda: uncached()(planned)(image).mean(), seed), expected)


def test_a_plan_travels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tower()
    plan = Planner(model, IMAGE, untraced=("halting",)).plan(1.0)
    plan.save(tmp_path / "plan.json")
    planned = RockmateModule(model, IMAGE, plan=Plan.load(tmp_path / "plan.json"))
    _agree(model, planned, IMAGE)


class Trimming(nn.Module):
    """Returns as many rows as have a positive sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1) > 0]


def test_another_shape_is_refused_in_words() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Trimming(), nn.Linear(16, 2))
    planned = RockmateModule(model, IMAGE, 1.0, untraced=["1"])
    rows = len(planned(IMAGE))
    assert 0 < rows < len(IMAGE)
    with pytest.raises(UnsupportedModelError, match="same shapes in every step"):
        planned(IMAGE.flip(1) * torch.tensor([[1.0], [-1.0]]).repeat(3, 1))


def test_names_are_checked() -> None:
    with pytest.raises(
        InvalidSampleError, match=r"'haltng', which is no submodule of Tower.*Near it: halting"
    ):
        Planner(Tower(), IMAGE, untraced=("haltng",))
    with pytest.raises(InvalidSampleError, match="does not call the submodule halting"):
        Planner(Tower(num_calls=0), IMAGE, untraced=("halting",))


def test_it_cannot_be_planned_for_a_machine_that_is_elsewhere() -> None:
    with pytest.raises(UnsupportedModelError, match="has to run"):
        Planner(Tower(), IMAGE, untraced=("halting",), machine="h100")


def test_a_second_backward_is_refused() -> None:
    planned = RockmateModule(Tower(), IMAGE, 1.0, untraced=["halting"])
    with pytest.raises(
        BackwardError, match="retain_graph=True is not possible with the untraced submodule halting"
    ):
        planned(IMAGE).backward(retain_graph=True)


def test_hooks_of_the_submodule_itself_run_once() -> None:
    torch.manual_seed(0)
    model = Tower()
    model.halting.register_forward_hook(lambda module, inputs, output: output * 3)
    model.halting.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    _agree(model, RockmateModule(model, IMAGE, 1.0, untraced=["halting"]), IMAGE)


def test_a_value_that_a_hook_hands_out_is_no_part_of_the_loss() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    seen: list[torch.Tensor] = []
    model[1][0].register_forward_hook(lambda module, args, output: seen.append(output + 1))
    x = torch.randn(4, 8)
    module = RockmateModule(model, x, 1.0, untraced=["1"])
    output = module(x)
    with pytest.raises(BackwardError, match="reaches the loss by a hook"):
        (output.sum() + seen[-1].square().sum()).backward()


def test_a_copy_runs_its_own_submodules() -> None:
    torch.manual_seed(0)
    model = Tower(normalizes=True)
    planned = RockmateModule(model, IMAGE, 1.0, untraced=["halting"])
    twin = copy.deepcopy(planned)
    before = [buffer.clone() for buffer in model.buffers()]
    _agree(twin.original, twin, IMAGE)
    assert_alike(before, model.buffers())


class Choosing(nn.Module):
    """Runs one of two layers, as its input says, with a scale that only the first one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.first(x) if x.sum().item() > 0 else self.second(x)


class Chosen(nn.Module):
    """The second layer of two to choose from is tied to one outside if wanted."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.choosing = Choosing()
        self.head = nn.Linear(16, 16)
        if tied:
            self.choosing.second.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.choosing(x)).square().mean()


@pytest.mark.parametrize("gradients", ["accumulated", "returned"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_parameter_that_a_step_does_not_use_is_left_alone(tied: bool, gradients: str) -> None:
    torch.manual_seed(0)
    model = Chosen(tied=tied)
    reference = copy.deepcopy(model)
    planned = RockmateModule(model, IMAGE, 1.0, untraced=["choosing"], gradients=gradients)
    fired: list[tuple[int, str]] = []
    for place, owner in enumerate((model, reference)):
        for name, parameter in owner.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, place=place, name=name: fired.append((place, name))
            )
    for x in (IMAGE.abs(), IMAGE.abs(), -IMAGE.abs()):  # gradients accumulate
        fired.clear()
        planned(x).backward()
        reference(x).backward()
        # The engine visits what an autograd function takes, whatever it returns.
        if gradients == "accumulated":
            ours, theirs = ([name for at, name in fired if at == place] for place in (0, 1))
            assert sorted(ours) == sorted(theirs)
        assert_gradients_alike(model, reference, rtol=1e-5, atol=1e-7)
    assert reference.choosing.first.weight.grad is not None


@made_of(lambda: {"first": nn.Linear(16, 16), "second": nn.Linear(16, 16)})
class Forked(nn.Module):
    """Two layers that each make an output.

    In some steps what the first one makes requires no gradient.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x) if x.sum().item() > 0 else x.detach(), self.second(x)


@made_of(lambda prong: {"forked": Forked(), "head": nn.Linear(16, 16), "prong": prong})
class OneProng(nn.Module):
    """Of the two outputs the loss depends on one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forked(x)[self.prong]).square().mean()


@pytest.mark.parametrize("prong", [0, 1])
def test_what_leads_to_an_output_that_the_loss_leaves_out_has_no_gradient(prong: int) -> None:
    torch.manual_seed(0)
    model = OneProng(prong)
    reference = copy.deepcopy(model)
    planned = RockmateModule(model, IMAGE.abs(), 1.0, untraced=["forked"])
    for x in (IMAGE.abs(), -IMAGE.abs()):
        model.zero_grad()
        reference.zero_grad()
        planned(x).backward()
        reference(x).backward()
        assert_gradients_alike(model, reference, rtol=1e-5, atol=1e-7)
    unused = reference.forked.second if prong == 0 else reference.forked.first
    assert all(parameter.grad is None for parameter in unused.parameters())


class Saving(nn.Module):
    """Its autograd graph saves what goes in and what comes out."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.square()) if x.sum().item() > -1e9 else x


@made_of(lambda: {"enter": nn.Linear(16, 16), "saving": Saving(), "head": nn.Linear(16, 16)})
class Beside(nn.Module):
    """What an untraced submodule saves has its last use in an elementwise op, which could otherwise
    run in place."""

    def forward(self, x: Tensor) -> Tensor:
        entered = self.enter(x)
        return self.head(torch.relu(self.saving(entered)) + torch.sigmoid(entered)).square().mean()


@pytest.mark.parametrize(
    ("make", "shape", "name"),
    [
        (Spectral, (256, 16), "complex"),
        (lambda: nn.Sequential(nn.Linear(16, 16), Selective(16, 4)), (64, 16), "1"),
        (Masked, (2, 8, 16, 16), "halting"),
        (Beside, (6, 16), "saving"),
    ],
    ids=[
        "an input that is saved conjugated as well", "a silent selective checkpoint",
        "a call as in a trace and gradients that lie as in eager",
        "a saved value that nothing overwrites in place",
    ],
)  # fmt: skip
def test_a_submodule_trains_as_in_eager(
    make: Callable[[], nn.Module], shape: tuple[int, ...], name: str
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    _agree(model, RockmateModule(model, x, 1.0, untraced=[name]), x)


class Doubled(nn.Module):
    """Layers that stand under two names each.

    One that is traced, a recurrent one, and one that is named to run as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = self.entrance = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.recur = self.recurrence = nn.GRU(16, 16)
        self.halting = self.halt = Halting(normalizes=True)
        self.halting.inside = self.halting.inner  # and one within

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrence(self.halt(self.entrance(self.enter(x))))[0].square().mean()


@pytest.mark.parametrize("name", ["halting", "halt"])
def test_layers_under_two_names_train_as_in_eager_and_stay_as_they_were(name: str) -> None:
    torch.manual_seed(0)
    model = Doubled()
    named = lambda: [*model.named_parameters(), *model.named_buffers()]  # noqa: E731
    before = {key: id(tensor) for key, tensor in named()}
    planned = RockmateModule(model, IMAGE, 1.0, untraced=[name])
    # Eager adds up the contributions of a layer's calls one by one.
    _agree(model, planned, IMAGE, rtol=1e-5, atol=1e-7)
    assert before == {key: id(tensor) for key, tensor in named()}


class Overwriting(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1) if x.sum().item() < 1e9 else x


@pytest.mark.parametrize("first", [nn.Linear(16, 16), nn.Identity()])
def test_an_input_that_is_changed_in_place_is_refused_in_words(first: nn.Module) -> None:
    given = IMAGE.clone()
    with pytest.raises(
        UnsupportedModelError, match=r"submodule 1 changes an input in place.*x = x.clone\(\)"
    ):
        Planner(nn.Sequential(first, Overwriting(), nn.Linear(16, 1)), given, untraced=("1",))
    assert torch.equal(given, IMAGE)


class Later(nn.Module):
    """Changes its input in place where that is negative, which the sample's is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1).clone() if x.sum().item() < 0 else x * 2


def test_an_input_that_a_later_step_changes_in_place_is_refused_in_words() -> None:
    planned = RockmateModule(
        nn.Sequential(Later(), nn.Linear(16, 1)), IMAGE.abs(), 1.0, untraced=["0"]
    )
    with pytest.raises(UnsupportedModelError, match="submodule 0 changes an input in place"):
        planned(-IMAGE.abs())


class Counting(nn.Module):
    """Returns a number beside its tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x * 2, int(x.sum().item() > 0)


@made_of(lambda: {"enter": nn.Linear(16, 16), "counting": Counting()})
class Counted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y, number = self.counting(self.enter(x) + 10 * x)
        return y.mean() * (1 + number)


def test_another_constant_is_refused_as_such() -> None:
    planned = RockmateModule(Counted(), IMAGE.abs(), 1.0, untraced=["counting"])
    with pytest.raises(
        UnsupportedModelError, match=r"returned \('tensor', 0\), and \('tensor', 1\) for the sample"
    ) as caught:
        planned(-IMAGE.abs())
    assert "shapes" not in str(caught.value)


@made_of(lambda weight: {"borrowed": [weight]})
class Borrowing(nn.Module):
    """Reads the weight of another layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.borrowed[0] if x.sum().item() < 1e9 else x


class Tied(nn.Sequential):
    """Its forward ties weights, which are no parameters where it runs as an op."""

    def forward(self, x: Tensor) -> Tensor:
        self[1].weight = self[0].weight
        return super().forward(x)


def test_a_forward_that_does_not_run_as_an_op_is_refused_in_words() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Tied(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(UnsupportedModelError, match=r"forward of 1 does not run apart .* cannot"):
        RockmateModule(model, torch.ones(2, 4), 1.0, untraced=["1"])


def test_a_parameter_of_somebody_else_is_refused() -> None:
    first = nn.Linear(16, 16)
    model = nn.Sequential(first, Borrowing(first.weight), nn.Linear(16, 1))
    with pytest.raises(UnsupportedModelError, match="neither its input nor its parameter"):
        Planner(model, IMAGE, untraced=("1",))


def test_a_forward_that_somebody_assigned_stays() -> None:
    model = Tower()
    assigned = model.halting.forward = lambda x, run=model.halting.forward: run(x) * 2
    Planner(model, IMAGE, untraced=("halting",))
    assert model.halting.forward is assigned
