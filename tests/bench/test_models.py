"""Every workload trains, repeats itself, and equals its checkpointed self."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_alike
from torch import nn

from bench import measure, models, peers
from bench.models.workload import modules_at
from rockmate.curves.measure import tensor_difference

NAMES = sorted(models.REGISTRY)
PEERS = {"eager": peers.eager, "checkpoint": peers.checkpoint_layers}


def needs_packages_of(name: str) -> None:
    if "lora" in name:
        pytest.importorskip("peft")
    if "qlora" in name:
        pytest.importorskip("bitsandbytes")
    if name in ("conditional-unet", "two-streams"):
        pytest.importorskip("diffusers")


@pytest.mark.parametrize("name", NAMES)
def test_tiny_model_trains_and_checkpointing_changes_no_bit(name: str) -> None:
    needs_packages_of(name)
    workload = models.build(name, tiny=True)
    batch = workload.make_batch(1)
    found = {}
    for peer_name, peer in PEERS.items():
        workload.model.zero_grad(set_to_none=True)
        with peer(workload) as model:
            loss = measure.training_step(workload, model, batch, seed=3)
        assert torch.isfinite(loss)
        found[peer_name] = measure.gradients_of(workload.model)
    names = {key for key, value in workload.model.named_parameters() if value.requires_grad}
    assert found["eager"].keys() == names
    assert all(gradient.isfinite().all() for gradient in found["eager"].values())
    assert tensor_difference(found["checkpoint"], found["eager"]).equal


@pytest.mark.parametrize("name", NAMES)
def test_batches_repeat_by_seed_and_keep_their_shapes(name: str) -> None:
    needs_packages_of(name)
    workload = models.build(name, tiny=True)
    first, recompute, other = workload.make_batch(1), workload.make_batch(1), workload.make_batch(2)
    assert all(torch.equal(first[key], recompute[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    shapes, others = ({k: v.shape for k, v in each.items()} for each in (first, other))
    assert shapes == others
    workload.model(**workload.sample)


def test_building_repeats_itself_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    one, other = models.build("gpt2", tiny=True), models.build("gpt2", tiny=True)
    assert torch.equal(before, torch.get_rng_state())
    assert_alike(one.model.parameters(), other.model.parameters())


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gpt2-deep"):
        models.build("gpt3")


def test_checkpointing_saves_memory_and_puts_the_forwards_back() -> None:
    workload = models.build("mlp", tiny=True)
    batch = workload.make_batch(1)
    peaks = {}
    for name, peer in PEERS.items():
        with peer(workload) as model:
            step = lambda model=model: measure.training_step(workload, model, batch, seed=0)  # noqa: E731
            step()
            peaks[name] = measure.allocator_peak(step)
    assert peaks["checkpoint"] < peaks["eager"]
    assert all("forward" not in vars(layer) for layer in workload.layers(workload.model))


def test_compared_models_are_in_the_table() -> None:
    assert set(models.COMPARED) <= models.REGISTRY.keys()


def test_unet_keeps_the_size_and_reads_each_skip_once() -> None:
    workload = models.build("unet", tiny=True)
    seen: list[int] = []
    for layer in workload.layers(workload.model)[3:]:
        layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1].shape[-1]))
    assert workload.model(**workload.sample).shape == (2, 8, 16, 16)
    assert seen == [8, 16]


def test_adapters_leave_the_base_frozen() -> None:
    pytest.importorskip("peft")
    model = models.build("llama-lora", tiny=True).model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)


def test_every_model_that_is_no_chain_is_in_the_table_and_most_have_natural_modules() -> None:
    assert set(models.BRANCHED) <= models.REGISTRY.keys()
    workload = models.build("hrnet", tiny=True)
    assert workload.stages is not None
    assert [
        len(found) for found in (workload.layers(workload.model), workload.stages(workload.model))
    ] == [4, 2]
    inside = workload.with_loss_inside()
    assert inside.stages is not None
    assert len(inside.stages(inside.model)) == 2


def test_patterns_match_whole_paths_and_a_wrong_one_is_told() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1))
    assert modules_at(model, ("*",)) == [model[0], model[1]]
    assert modules_at(model, ("0.*",)) == list(model[0])
    with pytest.raises(
        ValueError, match=r"no submodule of Sequential has a path like 'layers\.\*'"
    ):
        modules_at(model, ("layers.*",))
