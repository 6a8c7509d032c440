"""Moves together with all else that a planned step may have."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import moves
import pytest
import torch
from helpers import differing, gradients_of, same_gradients
from made_of import made_of
from moves import X, layers, module_of, step
from ranks import run_on_ranks
from sharded_net import assert_equal, net, planned, sharded, trained
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from rockmate import MissingCompilerError, RockmateModule
from rockmate.schedule.flights import Flights


def test_a_smaller_batch_reuses_the_schedule_with_its_moves(tmp_path: Path) -> None:
    model = layers()
    module = module_of(tmp_path, model)
    num_moves = len(module.plan.schedule.moves)
    same_gradients(module, copy.deepcopy(model), lambda callee: step(callee, X[1:]))
    assert len(module.plan.schedule.moves) == num_moves


def test_frozen_layers(tmp_path: Path) -> None:
    model = layers()
    for parameter in model[:6].parameters():
        parameter.requires_grad_(False)
    x = X.clone().requires_grad_()
    module = RockmateModule(model, x, 0.5, offload=f"disk:{tmp_path}")
    assert module.plan.schedule.moves
    same_gradients(module, copy.deepcopy(model), lambda callee: step(callee, x))


@made_of(lambda: {"body": layers(64, 4), "head": nn.Linear(64, 2048, bias=False)})
class Head(nn.Module):
    """Layers under a loss of many logits, which may run in chunks."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), labels)


def test_chunks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Head()
    sample = {"x": torch.randn(256, 64), "labels": torch.randint(0, 2048, (256,))}
    module = RockmateModule(
        model, sample, 600_000, offload=f"disk:{tmp_path}", numerics="any_order"
    )
    assert module.plan.options.loss_chunks
    eager = copy.deepcopy(model)
    for callee in (module, eager):
        callee(**sample).backward()
    ours, theirs = gradients_of(model), gradients_of(eager)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_marks_keep_a_value_here(tmp_path: Path) -> None:
    free = RockmateModule(layers(), X, 0.5, offload=f"disk:{tmp_path}").plan
    marked = RockmateModule(layers(), X, 0.5, offload=f"disk:{tmp_path}", marks={"2": "save"}).plan
    saved = {i for i, each in enumerate(marked.snapshot.storages) if each.mark == "save"}
    assert saved
    assert {move.storage for move in free.schedule.moves} & saved
    assert not {move.storage for move in marked.schedule.moves} & saved


def test_outputs_outside_the_loss(tmp_path: Path) -> None:
    @made_of(lambda: {"left": layers(number=4), "right": layers(number=4)})
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x).square().mean(), self.right(x).square().mean()

    model = Two()
    module = module_of(tmp_path, model, differentiable="all")
    eager = copy.deepcopy(model)
    for index in (0, 1):
        same_gradients(module, eager, lambda callee, index=index: callee(X)[index].backward())


def test_a_copy_has_a_tier_of_its_own(tmp_path: Path) -> None:
    model = layers()
    module = module_of(tmp_path, model)
    same_gradients(module, copy.deepcopy(model), step)
    twin = copy.deepcopy(module)
    same_gradients(twin, copy.deepcopy(model), step)


def test_what_an_opaque_module_takes_or_returns_stays(tmp_path: Path) -> None:
    model = layers()
    model[4] = nn.Sequential(nn.Linear(256, 256), nn.Tanh())
    eager = copy.deepcopy(model)
    module = RockmateModule(model, X, 0.75, offload=f"disk:{tmp_path}", untraced=("4",))
    plan = module.plan
    assert plan.schedule.moves
    opaque = [op for op in plan.graph.ops if "Opaque" in type(op.node.target).__name__]
    held = {
        s.index for op in opaque if op.phase.value == "forward" for s in (*op.reads, *op.writes)
    }
    assert held
    assert not held & {move.storage for move in plan.schedule.moves}
    same_gradients(module, eager, step)


def test_frames_do_not_move(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"offload belongs to planning"):
        RockmateModule(layers(), X, 0.5, mode="frames", offload=f"disk:{tmp_path}")


def test_compiled(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    compiled = torch.compile(
        model, backend="rockmate", options={"budget": 0.5, "offload": f"disk:{tmp_path}"}
    )
    same_gradients(model, eager, lambda callee: step(compiled if callee is model else eager))


def test_fused_kernels(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    try:
        module = module_of(tmp_path, model, kernels="fused")
    except MissingCompilerError:
        pytest.skip("no compiler")
    for callee in (module, eager):
        callee(X).square().mean().backward()
    ours, theirs = gradients_of(model), gradients_of(eager)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)


def test_data_parallel(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = layers()
        eager = copy.deepcopy(model)
        module = module_of(tmp_path, model)
        parallel = nn.parallel.DistributedDataParallel(module)
        for _ in range(2):
            for callee in (parallel, eager):
                callee(X).square().mean().backward()
        assert not differing(gradients_of(model), gradients_of(eager))
    finally:
        torch.distributed.destroy_process_group()


def check_data_parallel(mesh: DeviceMesh, folder: str) -> None:
    """Three steps of both ranks, each with rows of its own, as eager DDP takes them."""
    rate = moves.FAST.out_gb_per_s / (1 + distributed.get_rank())
    moves.use_fast_link(pytest.MonkeyPatch(), replace(moves.FAST, out_gb_per_s=rate))
    model = layers()
    eager = copy.deepcopy(model)
    module = module_of(Path(folder), model)
    parallel = [nn.parallel.DistributedDataParallel(each) for each in (module, eager)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, eager)]
    for index in range(3):
        x = X + 3 * index + distributed.get_rank()
        for callee, optimizer in zip(parallel, optimizers, strict=True):
            optimizer.zero_grad()
            output = callee(x)
            # Both ranks wait here with values in the folder.
            distributed.barrier()
            output.square().mean().backward()
        assert not differing(gradients_of(model), gradients_of(eager))
        for optimizer in optimizers:
            optimizer.step()
    assert not differing(dict(model.state_dict()), dict(eager.state_dict()))
    # One plan, although each rank has measured another link.
    plans: list[Any] = [None, None]
    distributed.all_gather_object(plans, module.plan.schedule.moves)
    assert plans[0]
    assert plans[0] == plans[1]
    assert not list(Path(folder).iterdir())


@pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")
def test_data_parallel_on_two_ranks_with_one_folder(tmp_path: Path) -> None:
    run_on_ranks(check_data_parallel, 2, str(tmp_path))


def check_sharded(mesh: DeviceMesh, folder: str) -> None:
    """Three steps of parameters sharded over ranks, as PyTorch's own sharding takes them."""
    moves.use_fast_link(pytest.MonkeyPatch())
    ours, theirs = sharded(net(), mesh), sharded(net(), mesh)
    module = planned(ours, 0.3, offload=f"disk:{folder}")
    assert_equal(trained(module, ours, seed=0), trained(theirs, theirs, seed=0))
    assert module.plan.schedule.moves
    assert module.plan.flights == Flights()


@pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")
def test_parameters_that_are_sharded(tmp_path: Path) -> None:
    run_on_ranks(check_sharded, 2, str(tmp_path))
