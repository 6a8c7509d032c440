"""Micro batches of a sharded model whose gradients are reduced once, as PyTorch's FSDP2 does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import needs_gloo, run_on_ranks
from sharded_net import Net, assert_equal, batch, collectives_of, net, planned, sharded, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from rockmate.ops import shards

pytestmark = needs_gloo


def is_empty(gradient: Any) -> bool:
    """Whether there is none yet; PyTorch 2.11 makes zeros of none on the way to a `DTensor`."""
    return gradient is None or not gradient.to_local().any()


def trained(module: nn.Module, model: Any, seed: int) -> list[Tensor]:
    """Two steps of three micro batches, of which only the last reduces; gradients are clipped."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Tensor]()
    for step in range(2):
        torch.manual_seed(100 * step + seed)
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            loss = module(batch(1000 * number + 10 * step + seed))
            loss.backward()
            found.append(loss.detach().clone())
            has_none = all(map(is_empty, [parameter.grad for parameter in model.parameters()]))
            assert has_none == (number < 2)
        found.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(whole, model.parameters())]


def check_training(mesh: DeviceMesh) -> None:
    """Bit for bit, in single and in mixed precision.

    In mixed precision, PyTorch 2.15 adds up the uses of a tied parameter in single precision in the
    first backward of several, and in half in the others.
    """
    rank = mesh.get_local_rank()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in (None, mixed, MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        options: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
        is_tied = policy is None or torch.__version__ < "2.15"
        theirs = sharded(net(is_tied=is_tied), mesh, **options)
        expected = trained(theirs, theirs, rank)
        for budget in (1.0, 0.3):
            model = sharded(net(is_tied=is_tied), mesh, **options)
            module = planned(model, budget)
            assert_equal(trained(module, model, rank), expected)


def check_number_of_reductions(mesh: DeviceMesh) -> None:
    """A backward that holds gradients runs none, also with a batch of another size."""
    num_reduced, rank = [0], mesh.get_local_rank()
    reduce = shards.start_reduction

    def counted(*args: Any) -> Tensor:
        num_reduced[0] += 1
        return reduce(*args)

    shards.start_reduction = counted
    model: Any = sharded(net(), mesh)
    module = planned(model, 0.5)
    batches = [batch(1), batch(2, size=4), batch(3)]
    torch.manual_seed(rank)
    model.set_requires_gradient_sync(False)
    for tokens in batches[:2]:
        module(tokens).backward()
    assert not num_reduced[0]
    model.set_requires_gradient_sync(True)
    module(batches[2]).backward()
    assert num_reduced[0] == 5
    assert [each.startswith("reduce") for each in collectives_of(module)].count(True) == 5
    expected = [whole(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(rank)
    for tokens in batches:
        module(tokens).backward()
    for parameter, sum_of_whole in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(whole(parameter.grad), sum_of_whole, rtol=1e-4, atol=1e-6)


def check_one_part(mesh: DeviceMesh) -> None:
    """One layer holds its gradients while the others reduce theirs."""
    found = []
    for is_planned in (False, True):
        model: Any = sharded(net(2), mesh)
        module = planned(model, 0.5) if is_planned else model
        torch.manual_seed(mesh.get_local_rank())
        model.layers[0].set_requires_gradient_sync(False)
        module(batch(1)).backward()
        parameters = list(model.parameters())
        assert [is_empty(each.grad) for each in parameters].count(True) == 6
        model.set_requires_gradient_sync(True)
        module(batch(2)).backward()
        found.append([whole(each.grad) for each in parameters])
    assert_equal(*found)


class TwoHeads(Net):
    """A second head that some batches leave out."""

    def __init__(self) -> None:
        super().__init__(2)
        self.other = nn.Linear(64, 2)
        self.uses_other = True

    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        return loss + self.other(self.embed(tokens)).square().mean() if self.uses_other else loss


def check_unused(mesh: DeviceMesh) -> None:
    """A parameter that the last micro batch leaves out gets what the earlier ones gave it."""
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model: Any = sharded(TwoHeads(), mesh)
        module = planned(model, 1.0) if is_planned else model
        torch.manual_seed(mesh.get_local_rank())
        model.set_requires_gradient_sync(False)
        module(batch(1)).backward()
        assert is_empty(model.other.weight.grad)
        model.set_requires_gradient_sync(True)
        model.uses_other = False
        module(batch(2)).backward()
        found.append([whole(each.grad) for each in model.parameters()])
    assert_equal(*found)


CHECKS = [check_training, check_number_of_reductions, check_one_part, check_unused]


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_two_processes(check: Any) -> None:
    run_on_ranks(check, 2)
