"""Two processes whose parameters are `DTensor`s: planned, with eager's bits on both ranks.

Each check runs in both processes. Eager is PyTorch's own: the same parallelized model, unplanned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import needs_gloo, run_on_ranks
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rockmate import PlanMismatchError, RockmateModule, UnsupportedModelError
from rockmate.runtime import plan_agreement

pytestmark = needs_gloo

NUM_RANKS = 2
WIDTH, NUM_HEADS, LENGTH = 32, 4, 16
BUDGETS = (0.6, 0.01)


class Attention(nn.Module):
    """Its number of heads follows from its weights, which may be a rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = (
            layer(x).view(batch, length, -1, WIDTH // NUM_HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))


def model_of(num_blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """Attention by heads, the feed-forward layers by columns and rows."""
    columns = dict.fromkeys(
        ("attention.query", "attention.key", "attention.value", "up"), ColwiseParallel
    )
    rows = dict.fromkeys(("attention.out", "down"), RowwiseParallel)
    model = model_of()
    for block in model:
        plan: Any = {name: style() for name, style in {**columns, **rows}.items()}
        parallelize_module(block, mesh, plan)
    return model


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    """Norms on a rank's part of the sequence, gathered in front of the attention."""
    model = model_of()
    for block in model:
        plan: Any = {
            "norm_1": SequenceParallel(),
            "norm_2": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            ),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


class Gathered(nn.Module):
    """A sharded parameter as the layer reads it."""

    def forward(self, parameter: DTensor) -> Tensor:
        whole = parameter.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def fully_sharded(mesh: DeviceMesh) -> nn.Module:
    """Each parameter sharded by rows, and gathered where it is read."""
    model = model_of()
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded))
            nn.utils.parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return model


def layout(tensor: Any) -> Any:
    return type(tensor), getattr(tensor, "placements", None)


def local(tensor: Any) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(module: nn.Module, model: nn.Module, batch: Callable[[int], Tensor]) -> list[Any]:
    """Losses, gradients and parameters of three steps of AdamW, with the layouts of gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found: list[Any] = []
    for step in range(3):
        x = batch(step)
        torch.manual_seed(step)
        loss = module(x).square().mean()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        optimizer.step()
        found += [local(loss), *map(local, gradients), *map(local, model.parameters())]
        found.append([layout(gradient) for gradient in gradients])
        optimizer.zero_grad()
    return found


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other


def check_as_eager(
    mesh: DeviceMesh, make: Callable[[DeviceMesh], nn.Module], *, length: int = LENGTH
) -> list[int]:
    """Trains at each budget and compares with eager; numbers of collectives in the plans."""
    is_data_parallel, rank = make is fully_sharded, distributed.get_rank()

    def batch(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + is_data_parallel * rank)
        return torch.randn(4, length, WIDTH, generator=generator)

    plain = make(mesh)
    expected = trained(plain, plain, batch)
    keys = list(plain.state_dict())
    numbers = []
    for budget in BUDGETS:
        model = make(mesh)
        module = RockmateModule(model, batch(0), budget, on_infeasible="least")
        assert_equal(trained(module, model, batch), expected)
        assert list(module.state_dict()) == keys
        assert module.plan.predicted_peak_bytes <= module.plan.baseline_peak_bytes
        agreed: list[Any] = [None] * NUM_RANKS
        runner = module._plans.runnables[0].runner
        code = runner.program.forward.code, runner.program.backward.code
        distributed.all_gather_object(agreed, code)
        assert agreed[0] == agreed[1]
        numbers.append(len(runner.program.collectives))
    return numbers


def check_tensor_parallel(mesh: DeviceMesh) -> None:
    numbers = check_as_eager(mesh, tensor_parallel)
    # Two reductions a block in the forward and two in the backward, at least.
    assert numbers[0] >= 2 * 4


def check_sequence_parallel(mesh: DeviceMesh) -> None:
    check_as_eager(mesh, sequence_parallel, length=LENGTH // NUM_RANKS)


def check_fully_sharded(mesh: DeviceMesh) -> None:
    numbers = check_as_eager(mesh, fully_sharded)
    num_parameters = len(list(model_of().parameters()))
    # A gather and a reduction for each; at the least budget more are gathered twice.
    assert numbers[0] >= 2 * num_parameters
    assert numbers[-1] > numbers[0]


def check_frames(mesh: DeviceMesh) -> None:
    """The way out where a plan is refused."""
    rank = mesh.get_rank()

    def same_batch(step: int) -> Tensor:
        return torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))

    def own_batch(step: int) -> Tensor:
        """Of another size on each rank, and now one is the larger, now the other."""
        return same_batch(step).repeat_interleave(1 + (rank + step) % 3, dim=0)

    def linger(layer: nn.Module, *_: Any) -> None:
        time.sleep(0.002 * ((rank + order[layer]) % 2))

    cases = ((tensor_parallel, same_batch), (fully_sharded, same_batch), (fully_sharded, own_batch))
    for make, batch in cases:
        plain, model = make(mesh), make(mesh)
        # Ranks take their time at different layers; they must give up the same frames.
        order = {layer: index for index, layer in enumerate(model.modules())}
        for layer in order:
            layer.register_forward_pre_hook(linger)
        framed = RockmateModule(model, None, 0.5, mode="frames", on_infeasible="least")
        assert_equal(trained(framed, model, batch), trained(plain, plain, batch))
        assert framed.frames is not None
        agreed: list[Any] = [None] * NUM_RANKS
        distributed.all_gather_object(agreed, framed.frames.counts.num_dropped)
        assert agreed[0] == agreed[1] > 0


class Scaled(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(distribute_tensor(torch.rand(WIDTH), mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        y: Any = (x * self.scale).tanh() * x * self.scale
        return y.redistribute(placements=[Replicate()]).to_local().square().sum()


def check_inputs(mesh: DeviceMesh) -> None:
    """A `DTensor` as input, and its gradient."""
    model, found = Scaled(mesh), []
    full = torch.randn(2 * NUM_RANKS, WIDTH)
    for is_planned in (True, False):
        x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
        module = RockmateModule(model, x, 1.0) if is_planned else model
        module(x).backward()
        found.append([local(x.grad), local(model.scale.grad)])
        assert layout(x.grad) == (DTensor, (Shard(0),))
        found[-1].append([layout(model.scale.grad)])
        model.zero_grad()
    assert_equal(*found)
    replicated = distribute_tensor(full, mesh, [Replicate()])
    module = RockmateModule(model, replicated, 1.0, replan=False)
    module(replicated).backward()
    other = distribute_tensor(full, mesh, [Shard(0)])
    with pytest.raises(Exception, match="this call differs"):
        module(other)


def check_two_in_flight(mesh: DeviceMesh) -> None:
    """A parameter of which each forward makes a sum of gradients."""
    model, found = Scaled(mesh), []
    one, other = (distribute_tensor(torch.randn(4, WIDTH), mesh, [Replicate()]) for _ in range(2))
    for module in (RockmateModule(model, one, 1.0, in_flight=2), model):
        (module(one) + module(other)).backward()
        found.append(local(model.scale.grad))
        model.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def check_refusals(mesh: DeviceMesh) -> None:
    x, rank = torch.randn(4, LENGTH, WIDTH), distributed.get_rank()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})
    with pytest.raises(UnsupportedModelError, match=r"wraps other tensors.*to_local.*mode=\"fra"):
        RockmateModule(model, x, 1.0)
    framed = RockmateModule(model, None, 1.0, mode="frames")
    framed(x).to_local().sum().backward()
    # One budget here and another there: other gathers run twice.
    module = RockmateModule(fully_sharded(mesh), x, BUDGETS[-rank], on_infeasible="least")
    with pytest.raises(PlanMismatchError, match=f"rank {1 - rank} runs other collectives"):
        module(x)


def check_a_rank_that_does_not_plan(mesh: DeviceMesh) -> None:
    """The others end with an error, and do not wait for ever."""
    model = tensor_parallel(mesh)
    if distributed.get_rank() == 0:
        module = RockmateModule(model, torch.randn(4, LENGTH, WIDTH), 1.0)
        plan_agreement.WAIT_S = 2.0
        with pytest.raises(PlanMismatchError, match=r"rank 1 has not planned .* within 2 s"):
            module(torch.randn(4, LENGTH, WIDTH))


CHECKS: list[Callable[[DeviceMesh], None]] = [
    check_tensor_parallel, check_sequence_parallel, check_fully_sharded, check_inputs, check_frames,
    check_two_in_flight, check_refusals, check_a_rank_that_does_not_plan,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_processes(check: Callable[[DeviceMesh], None]) -> None:
    run_on_ranks(check, NUM_RANKS)
