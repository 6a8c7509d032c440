"""Shards with replicas (HSDP) under a plan, against PyTorch's `fully_shard` on the same mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from sharded_net import assert_equal, batch, collectives_of, net, planned, sharded_by_torch, trained
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rockmate import UnsupportedModelError, fully_shard, timeline

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo"
)


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def check_training(_: DeviceMesh) -> None:
    """Bit for bit, with a batch of its own on each rank, at three budgets and without a plan."""
    mesh = two_by_two()
    rank = distributed.get_rank()
    theirs = sharded_by_torch(net(2), mesh)
    expected = trained(theirs, theirs, rank)
    for budget in (None, 1.0, 0.4):
        model: Any = fully_shard(net(2), mesh)
        module = model if budget is None else planned(model, budget)
        assert_equal(trained(module, model, rank), expected)
        assert model.get_parameter("embed.weight").placements == (Replicate(), Shard(0))


def check_policies(_: DeviceMesh) -> None:
    """Half precision, in which sums are divided in two parts, and micro batches."""
    mesh = two_by_two()
    rank = distributed.get_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    found = []
    for is_ours in (False, True):
        model: Any = net(2)
        if is_ours:
            fully_shard(model, mesh, mp_policy=policy)
        else:
            sharded_by_torch(model, mesh, mp_policy=policy)
        module = planned(model, 0.5) if is_ours else model
        found.append(trained(module, model, rank, num_micro_batches=2))
    assert_equal(*found)


def check_memory(_: DeviceMesh) -> None:
    mesh = two_by_two()
    model = fully_shard(net(), mesh)
    module = planned(model, 0.5)
    reductions = [text for text in collectives_of(module) if "reduce" in text]
    assert len(reductions) == 10  # each bucket over shards, then over replicas
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        module(batch()).backward()

    for _ in range(2):
        step()
    measured, predicted = timeline(step).peak_bytes, module.plan.predicted_peak_bytes
    assert abs(measured - predicted) <= 0.01 * predicted


def check_refusals(_: DeviceMesh) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tensor"))
    with pytest.raises(UnsupportedModelError, match=r'3 dimensions.*mesh\["replicate", "shard"\]'):
        fully_shard(net(2), mesh)
    model = net(2)
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel()})
    with pytest.raises(UnsupportedModelError, match=r"tensor parallelism.*one dimension"):
        fully_shard(model, mesh["replicate", "shard"])
    # As the first error advises.
    fully_shard(net(2), mesh["replicate", "shard"])(batch()).backward()


CHECKS = [check_training, check_policies, check_memory, check_refusals]


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_four_processes(check: Any) -> None:
    run_on_ranks(check, 4)
