"""Models that PyTorch's `fully_shard` has sharded: planned, against eager in the same processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from made_of import made_of
from ranks import needs_gloo, run_on_ranks
from sharded_net import (
    WIDTH,
    Net,
    OddNet,
    assert_equal,
    batch,
    collectives_of,
    net,
    planned,
    sharded,
    trained,
    trained_by_sgd,
    whole,
)
from torch import Tensor, distributed, nn
from torch.distributed import P2POp
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
    permute_tensor,
    wait_tensor,
)
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from rockmate import (
    BackwardError,
    Plan,
    PlanMismatchError,
    Planner,
    RockmateModule,
    UnsupportedModelError,
    timeline,
)
from rockmate.runtime import plan_agreement

pytestmark = needs_gloo


def placements(model: nn.Module) -> list[tuple[str, Any]]:
    named: Any = model.named_parameters()
    return [(name, parameter.placements) for name, parameter in named]


def check_training(mesh: DeviceMesh) -> None:
    """Bit for bit, from the loosest to the least budget, whatever eager gathers again."""
    rank = mesh.get_local_rank()
    theirs = sharded(net(), mesh)
    expected = trained(theirs, theirs, rank)
    reshards = {1.0: False, 0.5: True, 0.01: None}
    for budget, reshard_after_forward in reshards.items():
        model = sharded(net(), mesh, reshard_after_forward=reshard_after_forward)
        module = planned(model, budget)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "all_gather_into_tensor", None)  # what hooks would call
            assert_equal(trained(module, model, rank), expected)
        assert placements(model) == placements(theirs)
        check_number_of_gathers(module, budget)


def check_uneven(mesh: DeviceMesh) -> None:
    """Sizes that the ranks do not divide, and fewer rows than ranks."""
    rank, found = mesh.get_local_rank(), list[list[Tensor]]()
    for budget in (None, 1.0, 0.4):
        torch.manual_seed(0)
        model: Any = OddNet()
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh)
        module = model if budget is None else planned(model, budget)
        found.append(trained(module, model, rank))
        shapes = [each.grad is None and each.to_local().shape for each in model.parameters()]
        assert shapes == [each.to_local().shape for each in model.parameters()]
        for holds in (True, False):
            model.set_requires_gradient_sync(not holds)
            module(batch(rank)).backward()
        found[-1] += [whole(each.grad) for each in model.parameters()]
        with torch.no_grad():
            found[-1].append(model.eval()(batch(7)))
    for ours in found[1:]:
        assert_equal(ours, found[0])


def check_eval_between(mesh: DeviceMesh) -> None:
    """Eval runs PyTorch's hooks, which leave the root's parameters gathered."""
    rank, found = mesh.get_local_rank(), list[list[Tensor]]()
    for is_planned in (False, True):
        model = sharded(net(2), mesh)
        module: nn.Module = planned(model, 0.5) if is_planned else model
        values = list[Tensor]()
        for _ in range(2):
            with torch.no_grad():
                values += [module(batch(5)), module.eval()(batch(5))]
            module.train()
            values += trained(module, model, rank)
        model.unshard()  # pyright: ignore[reportAttributeAccessIssue]
        values += trained(module, model, rank)
        if isinstance(module, RockmateModule):
            assert len(module._plans.runnables) == 1
        found.append(values)
    assert_equal(*found)


RINGS: list[Any] = []  # the group of two ranks that exchange values


class Sent(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Any:
        found, x, other = torch.empty_like(x), x.contiguous(), distributed.get_rank() ^ 1
        pairs = (distributed.isend, x), (distributed.irecv, found)
        for each in distributed.batch_isend_irecv([P2POp(*pair, other) for pair in pairs]):
            each.wait()
        return found

    backward = forward


class Permuted(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Any:
        found = permute_tensor(x.flatten(), [1, 0], RINGS[0])
        return wait_tensor(found).view(x.shape)

    backward = forward


def all_to_all(x: Tensor) -> Any:
    return all_to_all_single_autograd(x, None, None, RINGS[0])


def ring_attention(x: Tensor, exchange: Callable[[Tensor], Any] = Permuted.apply) -> Any:
    """Each rank's tokens attend to those of all, which come by turns."""
    keys, top, bottom = x, torch.zeros(()), torch.zeros(())
    for _ in range(2):
        weights = (x @ keys.mT / WIDTH).exp()
        top, bottom = top + weights @ keys, bottom + weights.sum(-1, keepdim=True)
        keys = exchange(keys)
    return top / bottom


@made_of(lambda function: {"function": function})
class Exchange(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def check_exchanges(_: DeviceMesh) -> None:
    """Beside shards: functional collectives are planned, others refused by name, and run on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    RINGS.append(mesh.get_group("ring"))
    refusals: dict[Any, str] = {
        all_to_all: "",
        ring_attention: "",
        partial(ring_attention, exchange=Sent.apply): r"c10d\.(send|recv).*permute_tensor",
    }
    for function, refusal in refusals.items():
        found = []
        for is_planned in (False, True):
            model = net(2)
            model.layers[0].drop = Exchange(function)
            module = sharded(model, mesh["data"])
            if is_planned and refusal:
                refused(model, refusal)
            elif is_planned:
                module = planned(model, 0.5)
                assert sum("all_to_all" in each for each in collectives_of(module)) >= 2
            found.append(trained(module, model, distributed.get_rank()))
        assert_equal(*found)


def check_number_of_gathers(module: RockmateModule, budget: float | None) -> None:
    """One for each layer and one for the embedding; at the least budget some run again."""
    gathers = [text for text in collectives_of(module) if text.startswith("gather")]
    reductions = [text for text in collectives_of(module) if text.startswith("reduce")]
    assert len(reductions) == 5
    assert len(gathers) == 5 if budget == 1.0 else len(gathers) >= 5
    if budget == 0.01:
        assert len(gathers) > 5


def check_policies(mesh: DeviceMesh) -> None:
    """Gathers in half precision, reductions in single, and several micro batches a step.

    Without a dtype of reductions, that is as in the installed version of PyTorch.
    """
    rank = mesh.get_local_rank()
    for reduce_dtype in (torch.float32, torch.bfloat16, None):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        theirs = sharded(net(), mesh, mp_policy=policy)
        expected = trained(theirs, theirs, rank, num_micro_batches=2)
        for budget in (1.0, 0.3):
            model = sharded(net(), mesh, mp_policy=policy)
            module = planned(model, budget)
            assert_equal(trained(module, model, rank, num_micro_batches=2), expected)
            assert all(p.dtype == torch.float32 for p in model.parameters())


def check_memory(mesh: DeviceMesh) -> None:
    """Activations and gathered parameters together, on each rank."""
    for budget in (1.0, 0.6, 0.3, 0.01):
        model = sharded(net(), mesh)
        module = planned(model, budget, size=2)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tokens = batch(size=2)

        def step(module: nn.Module = module, tokens: Tensor = tokens) -> None:
            module(tokens).backward()

        for _ in range(2):
            step()
        measured = timeline(step).peak_bytes
        predicted = module.plan.predicted_peak_bytes
        assert predicted <= module.plan.budget_bytes
        assert abs(measured - predicted) <= 0.01 * predicted
    # All gathered parameters together are more than the smallest peak.
    total = sum(parameter.numel() * 4 for parameter in net().parameters())
    assert predicted < total


def check_checkpoints(mesh: DeviceMesh) -> None:
    """Of planned models and of others, in both directions; one is made without its memory first."""
    rank = mesh.get_local_rank()
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folders)
    ours, theirs = sharded(net(), mesh), sharded(net(), mesh)
    trained(planned(ours, 0.5), ours, rank)
    save(ours.state_dict(), checkpoint_id=f"{folders[0]}/ours")
    state = theirs.state_dict()
    load(state, checkpoint_id=f"{folders[0]}/ours")
    theirs.load_state_dict(state)
    assert_equal([*map(whole, theirs.parameters())], [*map(whole, ours.parameters())])

    plain = net()
    state = plain.state_dict()
    load(state, checkpoint_id=f"{folders[0]}/ours")
    plain.load_state_dict(state)
    assert_equal([*map(whole, plain.parameters())], [*map(whole, ours.parameters())])

    trained(theirs, theirs, rank)
    save(theirs.state_dict(), checkpoint_id=f"{folders[0]}/theirs")
    with torch.device("meta"):
        made = sharded(Net(), mesh)
    assert all(parameter.is_meta for parameter in made.parameters())
    made.to_empty(device="cpu")
    state = made.state_dict()
    load(state, checkpoint_id=f"{folders[0]}/theirs")
    made.load_state_dict(state)
    assert_equal([*map(whole, made.parameters())], [*map(whole, theirs.parameters())])
    assert_equal(trained(planned(made, 0.5), made, rank), trained(theirs, theirs, rank))


def check_frozen(mesh: DeviceMesh) -> None:
    """Adapters of a frozen base: only their gradients are reduced."""
    found = []
    for is_ours in (True, False):
        model = net(2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" in name or "norm" in name)
        sharded(model, mesh)
        module: nn.Module = planned(model, 0.5) if is_ours else model
        if isinstance(module, RockmateModule):
            reduced = [each for each in collectives_of(module) if each.startswith("reduce")]
            assert len(reduced) == 2
        found.append(trained(module, model, mesh.get_local_rank()))
    assert_equal(*found)


def refused(model: nn.Module, text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        RockmateModule(model, batch(), 1.0)


def check_refusals(mesh: DeviceMesh) -> None:
    refused(
        sharded(net(2), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), "CPUOffloadPolicy"
    )
    model: Any = sharded(net(2), mesh)
    model.set_gradient_divide_factor(1.0)
    refused(model, "set_gradient_divide_factor")
    refused(FullyShardedDataParallel(net(2), device_id=torch.device("cpu")), "FSDP1.*fully_shard")
    model = sharded(net(2), mesh)
    model.layers[0].drop = nn.LSTM(WIDTH, WIDTH)
    fully_shard(model.layers[0].drop, mesh=mesh)
    refused(model, r"layers.0.drop is not traced.*ignored_params")
    model = sharded(net(2), mesh)
    module = planned(model, 0.5, gradients="returned")
    parameters = list(model.parameters())
    assert all(each is not None for each in torch.autograd.grad(module(batch()), parameters))
    model.set_requires_gradient_sync(False)
    with pytest.raises(BackwardError, match="nowhere to add them up"):
        module(batch()).backward()
    model.set_requires_gradient_sync(True)
    module = planned(model, 0.5)
    model.set_gradient_divide_factor(1.0)
    with pytest.raises(BackwardError, match="set_gradient_divide_factor was called after"):
        module(batch()).backward()


def check_ignored(mesh: DeviceMesh) -> None:
    """Parameters that stay whole, which each rank trains by its own gradient, as in eager."""
    rank, found = mesh.get_local_rank(), list[list[Tensor]]()
    for is_planned in (False, True):
        model = net(2)
        whole_ones: Any = {each for each in model.parameters() if each.ndim == 1}
        sharded(model, mesh, ignored_params=whole_ones)
        module: nn.Module = planned(model, 0.5) if is_planned else model
        found.append(trained_by_sgd(module, model, rank))
        assert sum(isinstance(each, DTensor) for each in model.parameters()) == 5
    assert_equal(*found)


def check_other_sizes(mesh: DeviceMesh) -> None:
    """In each step the ranks have batches of other sizes, no larger than the sample."""
    rank, found = mesh.get_local_rank(), list[list[Tensor]]()
    for is_planned in (False, True):
        model = sharded(net(2), mesh)
        module: nn.Module = planned(model, 0.4) if is_planned else model
        optimizer, values = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Tensor]()
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            loss = module(batch(step + 10 * rank, size=2 + (step + 3 * rank) % 5))
            loss.backward()
            values.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        found.append([*values, *map(whole, model.parameters())])
    assert_equal(*found)


def check_wrapped_first(mesh: DeviceMesh) -> None:
    """`fully_shard` of a module that will be planned at its first call, as accelerate does it."""
    rank, found = mesh.get_local_rank(), list[list[Tensor]]()
    for is_planned in (False, True):
        model: Any = net(2)
        module: Any = model
        if is_planned:
            module = RockmateModule(model, None, 0.5, numerics="bitwise", on_infeasible="least")
        for each in (*module.layers, module):
            fully_shard(each, mesh=mesh)
        assert isinstance(module, FSDPModule)
        values = trained(module, module, rank)
        with torch.no_grad():
            values.append(module.eval()(batch(5)))
        assert not is_planned or module.is_planned
        module.set_requires_gradient_sync(False)
        module.train()(batch(rank)).backward()
        module.set_requires_gradient_sync(True)
        found.append([*values, *trained(module, module, rank)])
        assert list(module.state_dict()) == list(net(2).state_dict())
    assert_equal(*found)


def check_plan_of_another_mesh(mesh: DeviceMesh) -> None:
    texts: list[Any] = [None]
    if mesh.get_local_rank() == 0:
        texts[0] = Planner(sharded(net(), mesh), batch()).plan(0.5).to_text()
    # Each rank measures its own op times, and its plans differ from those of others.
    distributed.broadcast_object_list(texts)
    plan = Plan.from_text(texts[0])
    module = RockmateModule(sharded(net(), mesh), batch(), plan=plan)
    module(batch()).backward()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))["shard"]
    with pytest.raises(PlanMismatchError):
        RockmateModule(sharded(net(), alone), batch(), plan=plan)


def check_other_budgets(mesh: DeviceMesh) -> None:
    """Ranks of which one keeps parameters and one gathers them again stop before the first step."""
    rank = mesh.get_local_rank()
    module = planned(sharded(net(), mesh), (1.0, 0.01)[rank])
    with pytest.raises(PlanMismatchError, match=f"rank {1 - rank} runs other collectives"):
        module(batch())
    module = planned(sharded(net(2 + 2 * rank), mesh), 1.0)
    with pytest.raises(PlanMismatchError, match=f"rank {1 - rank} runs other collectives"):
        module(batch())


def confirm(collectives: Sequence[tuple[str, str]]) -> None:
    plan_agreement.confirm_order(nn.Identity(), plan_agreement.order_of(collectives))


def check_interleaved_groups(mesh: DeviceMesh) -> None:
    """Two groups of the same ranks, whose collectives each rank runs in another order."""
    other = init_device_mesh("cpu", (2,))
    names = [mesh.get_group().group_name, other.get_group().group_name]
    if names[0] == names[1]:
        made: Any = distributed.new_group([0, 1])
        names[1] = made.group_name
    texts = [("first", names[0]), ("second", names[1])]
    confirm(texts)
    rank = mesh.get_local_rank()
    with pytest.raises(PlanMismatchError, match="in another order"):
        confirm(texts[:: 1 - 2 * rank])


def check_a_circle_of_groups(_: DeviceMesh) -> None:
    """Each pair of four ranks agrees on its own collectives, and nobody could begin."""
    made: list[Any] = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    # Of a group that it is not in, a rank has a number.
    names = {key: getattr(group, "group_name", "") for key, group in zip("rsde", made, strict=True)}
    rank = distributed.get_rank()
    for order in ({0: "rd", 1: "re", 2: "sd", 3: "se"}, {0: "rd", 1: "er", 2: "ds", 3: "se"}):
        texts = [("reduce", names[group]) for group in order[rank]]
        if order[1] == "re":
            confirm(texts)
            continue
        with pytest.raises(PlanMismatchError, match="in another order"):
            confirm(texts)


def check_death(mesh: DeviceMesh) -> None:
    """The other rank ends with an error of its collective, and does not wait for ever."""
    model = sharded(net(), mesh)
    module = planned(model, 0.5)
    module(batch()).backward()
    loss = module(batch())
    if mesh.get_local_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"(?i)connection|timed out|gloo"):
        loss.backward()
    os._exit(0)


CHECKS: dict[Callable[[DeviceMesh], None], int] = {
    check_training: 2, check_uneven: 3, check_eval_between: 2, check_exchanges: 4, check_ignored: 2,
    check_wrapped_first: 2, check_other_sizes: 2, check_policies: 2, check_memory: 2,
    check_checkpoints: 2, check_frozen: 2, check_refusals: 2, check_plan_of_another_mesh: 2,
    check_other_budgets: 2, check_interleaved_groups: 2, check_a_circle_of_groups: 4,
    check_death: 2,
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_processes(check: Callable[[DeviceMesh], None]) -> None:
    run_on_ranks(check, CHECKS[check])
