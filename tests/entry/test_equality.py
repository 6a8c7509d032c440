"""Training through a plan gives eager's numbers, bit for bit.

Every model, every regime, three steps, dropout on.
"""

from __future__ import annotations

import copy
import functools

import models
import pytest
import torch
from helpers import (
    REGIMES,
    Step,
    assert_same_steps,
    check_against_eager,
    modules_of,
    one_step,
    planned,
    relative_error,
    train,
    workload_loss,
)
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from twice import Numbers, Wrap, differences

from rockmate import Planner, RockmateModule
from rockmate.entry.module import Mode


@functools.cache
def eager_steps(name: str) -> list[Step]:
    case = planned(name)
    model = case.eager()
    return train(model, model, workload_loss(case.workload))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    "name", [name for name in models.TINY if name not in models.SUMS_IN_ANOTHER_ORDER]
)
def test_three_steps_are_eagers_bit_for_bit(name: str, regime: str) -> None:
    case = planned(name)
    module = case.module(regime)
    ours = train(module, case.workload.model, workload_loss(case.workload))
    assert_same_steps(ours, eager_steps(name))
    assert len({step.loss.item() for step in ours}) == 3  # the weights did move


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", sorted(models.SUMS_IN_ANOTHER_ORDER))
def test_weight_of_three_uses_differs_by_rounding_only(name: str, regime: str) -> None:
    case = planned(name)
    module, owner, eager = case.module(regime), case.workload.model, case.eager()
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    for seed in (1, 2, 3):
        owner.load_state_dict(eager.state_dict())
        owner.zero_grad()
        optimizer.zero_grad()
        reference = one_step(eager, eager, workload_loss(case.workload), seed)
        ours = one_step(module, owner, workload_loss(case.workload), seed)
        assert torch.equal(ours.loss, reference.loss)
        assert all(torch.equal(a, b) for a, b in zip(ours.outputs, reference.outputs, strict=True))
        assert torch.equal(ours.random_state, reference.random_state)
        assert ours.gradients.keys() == reference.gradients.keys()
        for key, gradient in reference.gradients.items():
            assert relative_error(ours.gradients[key], gradient) <= 1e-6
        optimizer.step()


@pytest.mark.parametrize("name", sorted(models.HAS_DROPOUT))
def test_tight_plans_do_recompute_random_ops(name: str) -> None:
    """Else the equality above would say nothing of the replay."""
    case = planned(name)
    schedule = case.planner.plan(case.planner.minimum_peak_bytes).schedule
    assert schedule.num_recomputations() > 0
    graph = case.planner.plan(1.0).graph
    assert any(graph.ops[i].is_random for i in schedule.steps)


def test_batch_norm_of_every_kind_is_updated_once() -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([0, 1, 2, 3])
    model = models.BatchNormNet()

    def loss_of(module: nn.Module, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = module(images * step)
        return logits, functional.cross_entropy(logits, target)

    check_against_eager(model, images, loss_of)
    assert model.bn1.num_batches_tracked == 3  # the last of the regimes, from a fresh start
    assert model.bn2.num_batches_tracked == 3


def test_batch_norm_in_eval_mode_inside_a_training_model_stays_as_it_is() -> None:
    images = torch.randn(4, 3, 8, 8)
    model = models.BatchNormNet().train()
    model.bn1.eval()
    model.bn1.running_mean.fill_(0.25)
    mean = model.bn1.running_mean.clone()
    check_against_eager(
        model, images, lambda module, step: (None, module(images * step).square().sum())
    )
    assert torch.equal(model.bn1.running_mean, mean)
    assert not model.bn1.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    x = torch.randn(64, 16).to(dtype)
    model = models.Stack().to(dtype)
    check_against_eager(
        model, x, lambda module, step: (None, module(x * step).float().square().mean())
    )


@pytest.mark.parametrize("probability", [0.0, 1.0, 0.5])
def test_dropout_at_its_extremes(probability: float) -> None:
    x = torch.randn(64, 16)
    check_against_eager(
        models.Stack(dropout=probability),
        x,
        lambda module, step: (None, module(x * step).square().mean()),
    )


def test_every_kind_of_dropout() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Dropout2d(0.3),
        nn.ReLU(inplace=True),
        nn.AlphaDropout(0.2),
        nn.Conv2d(8, 4, 3),
        nn.RReLU(),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.FeatureAlphaDropout(0.2),
        nn.Dropout(0.5, inplace=True),
        nn.Linear(16, 4),
    )
    x = torch.randn(5, 3, 8, 8)
    check_against_eager(model, x, lambda module, step: (None, module(x * step).square().mean()))


def test_autocast_region_at_capture_and_at_the_call() -> None:
    class Careful(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return torch.mm(x.float(), x.float().t())

    x = torch.randn(64, 16)
    model = Careful()

    def loss_of(module: nn.Module, step: int) -> tuple[None, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x * step)
        return None, y.square().mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        planned_modules = modules_of(model, x)
    before = copy.deepcopy(model.state_dict())
    reference_model = copy.deepcopy(model)
    reference = train(reference_model, reference_model, loss_of)
    for module in planned_modules:
        model.load_state_dict(before)
        model.zero_grad()
        assert_same_steps(train(module, model, loss_of), reference)


@pytest.mark.parametrize("mode", ["plan", "auto", "frames"])
@pytest.mark.parametrize("num_first", [0, 3])
def test_kernels_of_attention_are_those_that_the_script_allows_around_the_call(
    mode: Mode, num_first: int
) -> None:
    """Backwards run outside, and the sample of a plan is captured outside."""
    layers = (nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(3))
    model, x = nn.Sequential(*layers), torch.randn(4, 8, 32)

    def script(wrap: Wrap) -> Numbers:
        own = copy.deepcopy(model)
        module, losses = wrap(own), []
        for step in range(6):
            kernels = SDPBackend.FLASH_ATTENTION if step < num_first else SDPBackend.MATH
            with sdpa_kernel(kernels):
                losses.append(module(x).square().mean())
            losses[-1].backward()
        return [*losses, own]

    def wrap(own: nn.Module) -> nn.Module:
        return RockmateModule(own, x, 0.6, on_infeasible="least", mode=mode)

    assert not differences(script, wrap)


def test_a_backward_whose_products_autocast_would_cast_takes_auto_to_frames() -> None:
    class Careful(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x).sin()

    model, x = nn.Sequential(Careful(16, 16), Careful(16, 16)), torch.randn(32, 16)

    def script(wrap: Wrap) -> Numbers:
        module = wrap(own := copy.deepcopy(model))
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                module(x).square().mean().backward()
        return [own]

    assert not differences(script, lambda own: RockmateModule(own, None, 1.0, mode="auto"))


@pytest.mark.parametrize("num_calls", [1, 2])
def test_gradients_of_uses_of_a_cast_weight_are_those_without_autocasts_cache(
    num_calls: int,
) -> None:
    class Shared(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return super().forward(x.sin()) if num_calls == 1 else x

    torch.manual_seed(0)
    model, x = Shared(16, 16), torch.randn(2, 64, 16)

    def gradients(module: nn.Module, *, cache_enabled: bool = True) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            losses = [module(x[call]).float().square().mean() for call in range(num_calls)]
        torch.stack(losses).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    with torch.autocast("cpu", torch.bfloat16):
        wrapped = RockmateModule(model, x[0], 1.0, numerics="bitwise", in_flight=num_calls)
    ours = gradients(wrapped)
    assert all(map(torch.equal, ours, gradients(model, cache_enabled=False)))
    assert not all(map(torch.equal, ours, gradients(model)))  # which round in between


def test_ops_are_measured_as_they_run_whatever_autocast_is_on() -> None:
    """Under autocast a product of fp32 matrices is made from bf16 copies of them, which would show
    as overhead of the op."""

    class Careful(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = Planner(Careful(64, 64, bias=False), torch.randn(64, 64)).plan(1.0)
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    overheads = [
        cost.overhead_bytes
        for op, cost in zip(plan.graph.ops, plan.costs.first, strict=True)
        if op.node.target in products
    ]
    assert overheads == [0] * 2


@pytest.mark.parametrize("probability", [0.1, 0.15, 0.35])
def test_dropout_that_no_gradient_goes_through(probability: float) -> None:
    """Its mask has no reader; 1 / (1 - 0.15) is another number where it is rounded at the end."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Dropout(probability), nn.Linear(32, 32)), torch.randn(48, 32)
    module = RockmateModule(model, x, 1.0, numerics="bitwise", trial="never")
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), expected)
