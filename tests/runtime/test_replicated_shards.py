"""Shards with replicas (HSDP) under a plan, against PyTorch's `fully_shard` on the same mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ranks import needs_gloo, run_on_ranks
from sharded_net import (
    OddNet,
    assert_equal,
    batch,
    collectives_of,
    net,
    planned,
    sharded,
    trained,
    trained_by_sgd,
)
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rockmate import BackwardError, timeline

pytestmark = needs_gloo


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def check_training(_: DeviceMesh) -> None:
    """Bit for bit, with a batch of its own on each rank, sizes that two divide and others."""
    mesh = two_by_two()
    rank = distributed.get_rank()
    for make in (partial(net, 2), OddNet):
        found = []
        for budget in (None, 1.0, 0.4):
            torch.manual_seed(0)
            model: Any = sharded(make(), mesh)
            module = planned(model, budget) if budget else model
            found.append(trained(module, model, rank))
            assert model.get_parameter("embed.weight").placements == (Replicate(), Shard(0))
        assert_equal(found[1], found[0])
        assert_equal(found[2], found[0])


def check_policies(_: DeviceMesh) -> None:
    """Half precision, in which sums are divided in two parts, and micro batches."""
    mesh = two_by_two()
    rank = distributed.get_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    found = []
    for is_ours in (False, True):
        model: Any = sharded(net(2), mesh, mp_policy=policy)
        module = planned(model, 0.5) if is_ours else model
        found.append(trained(module, model, rank, num_micro_batches=2))
    assert_equal(*found)


def check_memory(_: DeviceMesh) -> None:
    mesh = two_by_two()
    model = sharded(net(), mesh)
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


def check_tensor_parallelism(_: DeviceMesh) -> None:
    """Beside shards, and beside replicas on a mesh of three dimensions."""
    for sizes in ((2, 2), (2, 1, 2)):
        names = ("replicate", "shard", "tensor")[-len(sizes) :]
        mesh, found = init_device_mesh("cpu", sizes, mesh_dim_names=names), []
        for is_ours in (False, True):
            model = net(2)
            for layer in model.layers:
                plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(layer, mesh["tensor"], plan)
            sharded(model, mesh[names[:-1]])
            module: Any = planned(model, 0.5) if is_ours else model
            found.append(trained_by_sgd(module, model, mesh.get_local_rank(names[0])))
        assert_equal(*found)


def check_partial_reduction(_: DeviceMesh) -> None:
    """`set_requires_all_reduce(False)` is refused."""
    model: Any = sharded(net(2), two_by_two())
    module = planned(model, 0.5)
    model.set_requires_all_reduce(False)
    with pytest.raises(BackwardError, match="set_requires_all_reduce was called"):
        module(batch()).backward()


CHECKS = [
    check_training,
    check_policies,
    check_memory,
    check_tensor_parallelism,
    check_partial_reduction,
]


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_four_processes(check: Any) -> None:
    run_on_ranks(check, 4)
