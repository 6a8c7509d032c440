"""Every workload trains, repeats itself, and equals its checkpointed self.

The command line runs.
"""

from __future__ import annotations

import json

import pytest
import torch

from bench import measure, models, peers, run

NAMES = sorted(models.REGISTRY)


def needs_packages_of(name: str) -> None:
    if "lora" in name:
        pytest.importorskip("peft")
    if name in ("conditional-unet", "two-streams"):
        pytest.importorskip("diffusers")


@pytest.mark.parametrize("name", NAMES)
def test_tiny_model_trains_and_checkpointing_changes_no_bit(name: str) -> None:
    needs_packages_of(name)
    workload = models.build(name, tiny=True)
    batch = workload.make_batch(1)
    found = {}
    for peer_name, peer in peers.PEERS.items():
        workload.model.zero_grad(set_to_none=True)
        with peer(workload) as model:
            loss = measure.training_step(workload, model, batch, seed=3)
        assert torch.isfinite(loss)
        found[peer_name] = measure.gradients_of(workload.model)
    names = {key for key, value in workload.model.named_parameters() if value.requires_grad}
    assert found["eager"].keys() == names
    assert all(gradient.isfinite().all() for gradient in found["eager"].values())
    assert measure.tensor_difference(found["checkpoint"], found["eager"]).equal


@pytest.mark.parametrize("name", NAMES)
def test_batches_repeat_by_seed_and_keep_their_shapes(name: str) -> None:
    needs_packages_of(name)
    workload = models.build(name, tiny=True)
    first, recompute, other = workload.make_batch(1), workload.make_batch(1), workload.make_batch(2)
    assert all(torch.equal(first[key], recompute[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert {key: value.shape for key, value in first.items()} == {
        k: v.shape for k, v in other.items()
    }
    workload.model(**workload.sample)


def test_building_repeats_itself_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    one, other = models.build("gpt2", tiny=True), models.build("gpt2", tiny=True)
    assert torch.equal(before, torch.get_rng_state())
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gpt2-deep"):
        models.build("gpt3")


def test_checkpointing_saves_memory_and_puts_the_forwards_back() -> None:
    workload = models.build("mlp", tiny=True)
    batch = workload.make_batch(1)
    peaks = {}
    for name, peer in peers.PEERS.items():
        with peer(workload) as model:
            step = lambda model=model: measure.training_step(workload, model, batch, seed=0)  # noqa: E731
            step()
            peaks[name] = measure.allocator_peak(step)
    assert peaks["checkpoint"] < peaks["eager"]
    assert all("forward" not in vars(layer) for layer in workload.layers(workload.model))


def test_record_steps_repeats_itself_and_puts_the_weights_back() -> None:
    workload = models.build("resnet50", tiny=True)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    one = measure.record_steps(workload, workload.model, num_steps=2)
    other = measure.record_steps(workload, workload.model, num_steps=2)
    assert measure.tensor_difference(workload.model.state_dict(), before).equal
    assert not torch.equal(one[0].loss, one[1].loss)
    for a, b in zip(one, other, strict=True):
        assert measure.tensor_difference(a.gradients, b.gradients).equal
        assert measure.tensor_difference(a.buffers, b.buffers).equal


def test_command_line_without_a_budget_reports_eager_and_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run.main(["--model", "mlp", "--tiny", "--rounds", "1", "--checkpoint", "--no-resident"])
    record = json.loads(capsys.readouterr().out)
    assert record["checkpoint_peak_bytes"] < record["eager_peak_bytes"]
    assert record["checkpoint_ms"] > 0


def test_compared_models_are_in_the_table() -> None:
    assert all(name in models.REGISTRY for names in models.COMPARED.values() for name in names)


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
