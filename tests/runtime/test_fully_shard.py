"""`rockmate.fully_shard` under a plan, against `torch.distributed.fsdp` in the same processes."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from sharded_net import (
    LENGTH,
    NUM_TOKENS,
    WIDTH,
    Net,
    assert_equal,
    batch,
    collectives_of,
    net,
    planned,
    sharded_by_torch,
    trained,
    whole,
)
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from rockmate import (
    Plan,
    PlanMismatchError,
    Planner,
    RockmateModule,
    UnsupportedModelError,
    fully_shard,
    timeline,
)
from rockmate.runtime import plan_agreement

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo"
)


def placements(model: nn.Module) -> list[tuple[str, Any]]:
    named: Any = model.named_parameters()
    return [(name, parameter.placements) for name, parameter in named]


def check_training(mesh: DeviceMesh) -> None:
    """Bit for bit, from the loosest to the least budget, and without a plan."""
    rank = mesh.get_local_rank()
    theirs = sharded_by_torch(net(), mesh)
    expected = trained(theirs, theirs, rank)
    for budget in (None, 1.0, 0.5, 0.01):
        model = net()
        assert fully_shard(model, mesh) is model
        module = model if budget is None else planned(model, budget)
        assert_equal(trained(module, model, rank), expected)
        assert placements(model) == placements(theirs)
        if isinstance(module, RockmateModule):
            check_number_of_gathers(module, budget)


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
        theirs = sharded_by_torch(net(), mesh, mp_policy=policy)
        expected = trained(theirs, theirs, rank, num_micro_batches=2)
        for budget in (1.0, 0.3):
            model = fully_shard(net(), mesh, mp_policy=policy)
            module = planned(model, budget)
            assert_equal(trained(module, model, rank, num_micro_batches=2), expected)
            assert all(p.dtype == torch.float32 for p in model.parameters())


def check_memory(mesh: DeviceMesh) -> None:
    """Activations and gathered parameters together, on each rank."""
    for budget in (1.0, 0.6, 0.3, 0.01):
        model = fully_shard(net(), mesh)
        module = planned(model, budget)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tokens = batch()

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
    """Each loads what the other has saved; a model is made without its memory first."""
    rank = mesh.get_local_rank()
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folders)
    ours, theirs = fully_shard(net(), mesh), sharded_by_torch(net(), mesh)
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
        made = Net()
    fully_shard(made, mesh)
    assert all(parameter.is_meta for parameter in made.parameters())
    made.to_empty(device="cpu")
    state = made.state_dict()
    load(state, checkpoint_id=f"{folders[0]}/theirs")
    made.load_state_dict(state)
    assert_equal([*map(whole, made.parameters())], [*map(whole, theirs.parameters())])
    assert_equal(trained(planned(made, 0.5), made, rank), trained(theirs, theirs, rank))


def check_evaluation(mesh: DeviceMesh) -> None:
    """Without gradients a layer's parameters are gone when its forward has ended."""
    plain, model = net().eval(), fully_shard(net().eval(), mesh)
    with torch.no_grad():
        assert torch.equal(model(batch()), plain(batch()))
        first = timeline(lambda: model(batch())).peak_bytes
        largest = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in plain.layers)
        assert first < 4 * largest
    weight = model.get_parameter("embed.weight")
    assert weight.shape == (NUM_TOKENS, WIDTH)
    assert isinstance(weight, DTensor)


def check_frozen(mesh: DeviceMesh) -> None:
    """Adapters of a frozen base: only their gradients are reduced."""
    found = []
    for is_ours in (True, False):
        model = net(2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" in name or "norm" in name)
        if is_ours:
            module: nn.Module = planned(fully_shard(model, mesh), 0.5)
            assert isinstance(module, RockmateModule)
            reduced = [each for each in collectives_of(module) if each.startswith("reduce")]
            assert len(reduced) == 2
        else:
            module = sharded_by_torch(model, mesh)
        found.append(trained(module, model, mesh.get_local_rank()))
    assert_equal(*found)


def check_refusals(mesh: DeviceMesh) -> None:
    odd = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    with pytest.raises(UnsupportedModelError, match=r"0.weight of shape \(5, 3\).*2 ranks divide"):
        fully_shard(odd, mesh)
    assert not any(isinstance(parameter, DTensor) for parameter in odd.parameters())
    wide = nn.Sequential(nn.Linear(4, 4, bias=False).bfloat16())
    wide[0].weight.grad_dtype = torch.float32
    with pytest.raises(UnsupportedModelError, match=r"0.weight is torch.bfloat16 .*torch.float32"):
        fully_shard(wide, mesh)
    with pytest.raises(UnsupportedModelError, match="ignored names 'nothing'"):
        fully_shard(net(), mesh, ignored=["nothing"])
    with pytest.raises(UnsupportedModelError, match="second list of its weights"):
        fully_shard(nn.Sequential(nn.LSTM(4, 4)), mesh)
    with pytest.raises(UnsupportedModelError, match="sharded already"):
        fully_shard(fully_shard(net(), mesh), mesh)
    with pytest.raises(UnsupportedModelError, match="cannot be copied"):
        copy.deepcopy(fully_shard(net(), mesh))
    theirs = sharded_by_torch(net(), mesh)
    first_generation = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    for each in (theirs, first_generation):
        with pytest.raises(UnsupportedModelError, match="sharded by PyTorch's FSDP"):
            fully_shard(each, mesh)
    with pytest.raises(UnsupportedModelError, match=r"rockmate.fully_shard\(model, mesh\)"):
        RockmateModule(theirs, batch(), 1.0)
    mixed = net()
    fully_shard(mixed.layers, mesh)
    with pytest.raises(UnsupportedModelError, match=r"embed.weight is a plain parameter.*ignored"):
        RockmateModule(mixed, batch(), 1.0)


def check_plan_of_another_mesh(mesh: DeviceMesh) -> None:
    texts: list[Any] = [None]
    if mesh.get_local_rank() == 0:
        texts[0] = Planner(fully_shard(net(), mesh), batch()).plan(0.5).to_text()
    # Each rank measures its own op times, and its plans differ from those of others.
    distributed.broadcast_object_list(texts)
    plan = Plan.from_text(texts[0])
    module = RockmateModule(fully_shard(net(), mesh), batch(), plan=plan)
    module(batch()).backward()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))["shard"]
    with pytest.raises(PlanMismatchError):
        RockmateModule(fully_shard(net(), alone), batch(), plan=plan)


def check_other_budgets(mesh: DeviceMesh) -> None:
    """Ranks of which one keeps parameters and one gathers them again stop before the first step."""
    rank = mesh.get_local_rank()
    module = planned(fully_shard(net(), mesh), (1.0, 0.01)[rank])
    with pytest.raises(PlanMismatchError, match=f"rank {1 - rank} runs other collectives"):
        module(batch())
    module = planned(fully_shard(net(2 + 2 * rank), mesh), 1.0)
    with pytest.raises(PlanMismatchError, match=f"rank {1 - rank} runs other collectives"):
        module(batch())


def check_interleaved_groups(mesh: DeviceMesh) -> None:
    """Two groups of the same ranks, whose collectives each rank runs in another order."""
    other = init_device_mesh("cpu", (2,))
    names = [mesh.get_group().group_name, other.get_group().group_name]
    if names[0] == names[1]:
        made: Any = distributed.new_group([0, 1])
        names[1] = made.group_name
    texts = [("first", names[0]), ("second", names[1])]
    plan_agreement.confirm_collectives(texts)
    rank = mesh.get_local_rank()
    with pytest.raises(PlanMismatchError, match="in another order"):
        plan_agreement.confirm_collectives(texts[:: 1 - 2 * rank])


def check_a_circle_of_groups(_: DeviceMesh) -> None:
    """Each pair of four ranks agrees on its own collectives, and nobody could begin."""
    made: list[Any] = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    # Of a group that it is not in, a rank has a number.
    names = {key: getattr(group, "group_name", "") for key, group in zip("rsde", made, strict=True)}
    rank = distributed.get_rank()
    for order in ({0: "rd", 1: "re", 2: "sd", 3: "se"}, {0: "rd", 1: "er", 2: "ds", 3: "se"}):
        texts = [("reduce", names[group]) for group in order[rank]]
        if order[1] == "re":
            plan_agreement.confirm_collectives(texts)
            continue
        with pytest.raises(PlanMismatchError, match="in another order"):
            plan_agreement.confirm_collectives(texts)


def check_death(mesh: DeviceMesh) -> None:
    """The other rank ends with an error of its collective, and does not wait for ever."""
    model = fully_shard(net(), mesh)
    module = planned(model, 0.5)
    module(batch()).backward()
    loss = module(batch())
    if mesh.get_local_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"(?i)connection|timed out|gloo"):
        loss.backward()
    os._exit(0)


def check_two_dimensions(_: DeviceMesh) -> None:
    """Tensor parallelism in pairs, and sharding across them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    across, rank = mesh["data"], mesh.get_local_rank("data")
    found = []
    for is_ours in (False, True):
        model = net(2)
        for layer in model.layers:
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tensor"], plan)
        if is_ours:
            module: nn.Module = planned(fully_shard(model, across), 0.5)
        else:
            module = sharded_by_torch(model, across)
        found.append(trained_by_sgd(module, model, rank))
        layouts = [layout for _, layout in placements(model)]
        assert layouts[0] == (Shard(0),)
        found[-1].append(torch.tensor([len(layout) for layout in layouts]))
    assert_equal(*found)


def check_four_ranks(mesh: DeviceMesh) -> None:
    theirs = sharded_by_torch(net(2), mesh)
    expected = trained(theirs, theirs, mesh.get_local_rank())
    model = fully_shard(net(2), mesh)
    assert_equal(trained(planned(model, 0.4), model, mesh.get_local_rank()), expected)


def check_architectures(mesh: DeviceMesh) -> None:
    """Losses, norms and parameters of architectures from configurations, dropout on."""
    import transformers

    classify = "single_label_classification"
    common: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    configs = [
        *(
            # Dropout within attention, fused and in ops of its own.
            transformers.GPT2Config(
                vocab_size=NUM_TOKENS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4,
                attn_pdrop=0.1, attn_implementation=attention, **common,
            )
            for attention in ("sdpa", "eager")
        ),
        transformers.LlamaConfig(
            vocab_size=NUM_TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1, **common,
        ),
        transformers.ViTConfig(
            image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=64, hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1, num_labels=8, problem_type=classify,
        ),
    ]  # fmt: skip
    for config in configs:
        found = []
        for is_ours in (False, True):
            torch.manual_seed(0)
            is_text = config.model_type != "vit"
            name = "AutoModelForCausalLM" if is_text else "AutoModelForImageClassification"
            model = getattr(transformers, name).from_config(config).train()
            make = text_batch if is_text else image_batch
            if is_ours:
                fully_shard(model, mesh)
                module = RockmateModule(model, make(0), 0.5, numerics="bitwise")
                assert module.plan.predicted_peak_bytes < module.plan.baseline_peak_bytes
            else:
                for layer in layers_of(model):
                    fully_shard_of_torch(layer, mesh=mesh)
                module = fully_shard_of_torch(model, mesh=mesh)
            found.append(trained_by_loss(module, model, make, mesh.get_local_rank()))
        assert_equal(*found)


def text_batch(seed: int) -> dict[str, Tensor]:
    tokens = batch(seed, size=4)
    return {"input_ids": tokens, "labels": tokens}


def image_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(4, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 8, (4,), generator=generator)}


def layers_of(model: nn.Module) -> list[nn.Module]:
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    return [*next(lists)]


def trained_by_loss(
    module: nn.Module, model: nn.Module, make: Callable[[int], dict[str, Tensor]], seed: int
) -> list[Tensor]:
    """As `trained`, for models that return their loss."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Tensor]()
    for step in range(3):
        torch.manual_seed(100 * step + seed)
        loss = module(**make(10 * step + seed)).loss
        loss.backward()
        found.append(loss.detach().clone())
        norm = norm_of_gradients(model)
        found.append(norm)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(whole, model.parameters())]


def norm_of_gradients(model: nn.Module) -> Tensor:
    """From whole gradients: kernels for norms of shards round by where those lie in memory."""
    whole_ones = [whole(p.grad).double() for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(whole_ones).float()


def trained_by_sgd(module: nn.Module, model: nn.Module, seed: int) -> list[Tensor]:
    """As `trained`; foreach kernels take no parameters of two meshes together."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), list[Tensor]()
    for step in range(3):
        torch.manual_seed(100 * step + seed)
        loss = module(batch(10 * step + seed))
        loss.backward()
        found.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(whole, model.parameters())]


CHECKS: dict[Callable[[DeviceMesh], None], int] = {
    check_training: 2,
    check_policies: 2,
    check_memory: 2,
    check_checkpoints: 2,
    check_evaluation: 2,
    check_frozen: 2,
    check_refusals: 2,
    check_plan_of_another_mesh: 2,
    check_other_budgets: 2,
    check_interleaved_groups: 2,
    check_a_circle_of_groups: 4,
    check_death: 2,
    check_architectures: 2,
    check_two_dimensions: 4,
    check_four_ranks: 4,
}


@pytest.mark.parametrize("index", range(len(CHECKS)), ids=[check.__name__ for check in CHECKS])
def test_processes(index: int) -> None:
    check, num_ranks = [*CHECKS.items()][index]
    run_on_ranks(check, num_ranks)
