"""Frozen weights at home on a disk: eager's bits, the predicted bytes, and tensors as they were."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fine_tuning import batch, llama
from helpers import differing, net_allocated, same_gradients
from models import Adapted
from moves import Net, rows
from safetensors.torch import load_file, save_file
from schedules import verify
from torch import Tensor, nn

import rockmate.memory_limit
from bench.measure import allocator_peak
from rockmate import (
    InfeasibleBudgetError,
    NothingFitsError,
    OffloadError,
    Planner,
    RockmateModule,
    fit,
)
from rockmate.capture.tensor_parts import inner_tensors
from rockmate.errors import InfeasibleMemoryLimitError, InvalidArgumentError, InvalidBudgetError

QUICK: dict[str, Any] = {"time_limit_s": 0.5, "numerics": "bitwise"}


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with all of its parameters frozen, and adapters beside its products."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, Adapted(child, 4))
    return model


def layers() -> nn.Module:
    """Sixteen frozen products of 64 KiB each, with adapters and activations between them."""
    torch.manual_seed(0)
    parts = [part for _ in range(16) for part in (nn.Linear(128, 128), nn.GELU())]
    return Net(*[Adapted(p, 4) if isinstance(p, nn.Linear) else p for p in parts]).train()


def frozen_bytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters() if not each.requires_grad)


def planner_of(folder: Path, model: nn.Module, sample: Any = None, **options: Any) -> Planner:
    home: dict[str, Any] = {"offload": f"disk:{folder}", "weights": "auto", **QUICK}
    return Planner(model, rows() if sample is None else sample, **home | options)


def module_of(folder: Path, model: nn.Module, sample: Any = None, **options: Any) -> RockmateModule:
    """The model within a third of its frozen weights."""
    home: dict[str, Any] = {"offload": f"disk:{folder}", "weights": "auto", **QUICK}
    sample = rows() if sample is None else sample
    module = RockmateModule(model, sample, frozen_bytes(model) // 3, **home | options)
    assert module.plan.schedule.fetches
    return module


def same_step(module: Any, eager: nn.Module, x: Tensor) -> None:
    same_gradients(module, eager, lambda callee: callee(x).backward())


@pytest.mark.parametrize("share", [0.6, 0.3, 0.0])
def test_steps_have_the_bits_of_eager_and_the_predicted_bytes(share: float, tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    planner = planner_of(tmp_path, model)
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(1)
    least, whole = caught.value.minimum_bytes, planner.weight_bytes + planner.baseline_peak_bytes
    assert least < frozen_bytes(model) / 3
    budget = int(least + share * (whole - least))
    plan = planner.plan(budget)
    verify(plan.graph, plan.schedule)
    in_memory = {n: p.data_ptr() for n, p in model.named_parameters()}
    module = planner.module_of(plan, trial="never")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, eager)]
    for seed in range(3):
        same_step(module, eager, rows(seed))
        for optimizer in optimizers:
            optimizer.step()
    assert not differing(dict(model.state_dict()), dict(eager.state_dict()))
    away = [p.nbytes for n, p in model.named_parameters() if p.data_ptr() != in_memory[n]]
    assert sum(away) == planner.weight_bytes - (budget - plan.budget_bytes) > 0
    x = rows(1)
    measured = allocator_peak(lambda: module(x).backward())
    assert measured == plan.predicted_peak_bytes <= plan.budget_bytes
    assert net_allocated(lambda: module(x).backward()) == 0
    assert not list(tmp_path.iterdir())


def in_four_bits(layer: nn.Linear) -> nn.Module:
    quantized = pytest.importorskip("bitsandbytes").nn
    found = quantized.Linear4bit(128, 128, compute_dtype=torch.float32, quant_type="nf4")
    found.load_state_dict(layer.state_dict())
    return found.to("cpu").requires_grad_(False)


def by_torchao(layer: nn.Linear) -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer.requires_grad_(False)


def addresses(model: nn.Module) -> dict[str, int]:
    """Of what the weights are made of."""
    named = {name: inner_tensors(each) or {(): each} for name, each in model.named_parameters()}
    return {f"{n}{path}": t.data_ptr() for n, inner in named.items() for path, t in inner.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantize", [in_four_bits, by_torchao])
def test_quantized_weights_go_home_as_they_are(
    quantize: Callable[[nn.Linear], nn.Module], tmp_path: Path
) -> None:
    model = layers()
    for each in model.modules():
        if isinstance(each, Adapted):
            each.inner = quantize(each.inner)  # pyright: ignore
    eager, where = copy.deepcopy(model), addresses(model)
    planner = planner_of(tmp_path, model)
    module = planner.module(planner.minimum_peak_bytes + 4096)
    assert module.plan.schedule.fetches
    for seed in (1, 2):
        same_step(module, eager, rows(seed))
    assert {name for name, place in addresses(model).items() if place != where[name]}
    assert torch.equal(model.eval()(rows(3)), eager.eval()(rows(3)))


def test_a_budget_that_holds_all_has_the_plan_of_resident_weights(tmp_path: Path) -> None:
    model = layers()
    planner = planner_of(tmp_path, model)
    peak = planner.baseline_peak_bytes
    plan = planner.plan(planner.weight_bytes + peak)
    resident = planner_of(tmp_path, model, weights="resident").plan(peak)
    assert plan.schedule == resident.schedule
    assert not plan.schedule.copies
    assert (plan.budget_bytes, plan.predicted_peak_bytes) == (peak, resident.predicted_peak_bytes)


@pytest.mark.parametrize("is_tied", [False, True])
def test_scripts_find_the_weights_of_a_language_model_whole(is_tied: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3}
    model = with_adapters(llama(**sizes, tie_word_embeddings=is_tied))
    eager = copy.deepcopy(model)
    module = module_of(tmp_path, model, batch(), outputs="loss")
    assert not differing(dict(module.state_dict()), dict(eager.state_dict()))
    words = batch()["input_ids"]
    ours, theirs = (each.eval().generate(words, max_new_tokens=4) for each in (module, eager))
    assert torch.equal(ours, theirs)
    module.train()
    eager.train()
    same_gradients(module, eager, lambda callee: callee(**batch(1)).loss.backward())


def test_weights_that_are_mapped_from_a_file_go_home(tmp_path: Path) -> None:
    """As `load_file` maps them into a model of the meta device."""
    eager = layers()
    save_file(eager.state_dict(), tmp_path / "weights.safetensors")
    with torch.device("meta"):
        model = layers()
    model.load_state_dict(load_file(tmp_path / "weights.safetensors"), assign=True)
    module = module_of(tmp_path, model)
    same_step(module, eager, rows(1))


def test_what_a_script_writes_into_a_weight_counts(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    module = module_of(tmp_path, model)
    module(rows(0)).backward()
    for each in (model, eager):
        weight: Any = each.get_parameter("2.inner.weight")
        weight.data.mul_(1.5)
        other: Any = each.get_parameter("20.inner.weight")
        other.data = other.data * 0.5
    same_step(module, eager, rows(1))
    state = {name: 1.1 * value for name, value in eager.state_dict().items()}
    for each in (model, eager):
        each.load_state_dict(state)
    same_step(module, eager, rows(2))


def test_calls_of_other_sizes_have_the_bits_of_eager(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    module = module_of(tmp_path, model)
    for number in (16, 32, 40, 16):
        x = rows(3, number)
        same_step(module, eager, x)
    home: dict[str, Any] = {"offload": f"disk:{tmp_path}", "weights": "auto", **QUICK}
    module = RockmateModule(model, rows(), 2 * frozen_bytes(model), **home)
    same_step(module, eager, rows(3, 40))  # within the whole bound, not what activations had of it
    assert not module.plan.schedule.fetches


def test_a_kept_graph_and_two_forwards_have_the_bits_of_eager(tmp_path: Path) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    planner = planner_of(tmp_path, model, in_flight=2)
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(1)
    module = planner.module(caught.value.minimum_bytes)

    def both(callee: nn.Module) -> None:
        losses = [callee(rows(seed)) for seed in (1, 2)]
        losses[0].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()

    same_gradients(module, eager, both)


def test_a_full_home_is_an_error_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    plan = planner_of(tmp_path, model).plan(frozen_bytes(model) // 3)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"has .* free"):
        RockmateModule(model, rows(), plan=plan)
    monkeypatch.undo()
    module = RockmateModule(model, rows(), plan=plan)
    same_step(module, eager, rows(1))


def test_a_copy_that_fails_is_an_error_and_the_next_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    module = module_of(tmp_path, model, trial="never")

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OffloadError, match="the disk is gone"):
        module(rows())
    monkeypatch.undo()
    same_step(module, eager, rows(1))


def test_refusals(tmp_path: Path) -> None:
    model = layers()
    with pytest.raises(InvalidArgumentError, match="needs a home"):
        Planner(model, rows(), weights="auto")
    with pytest.raises(InvalidArgumentError, match="weights is 'home'"):
        Planner(model, rows(), offload=f"disk:{tmp_path}", weights="home")
    with pytest.raises(InvalidBudgetError, match="bounds weights, too"):
        planner_of(tmp_path, model).plan(0.5)


def test_a_memory_limit_bounds_weights_beside_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = layers()
    eager = copy.deepcopy(model)
    others, in_memory = 10_000_000, {each.data_ptr() for each in model.parameters()}

    def present(_: torch.device) -> int:
        parameters = model.parameters()
        return others + sum(each.nbytes for each in parameters if each.data_ptr() in in_memory)

    monkeypatch.setattr(rockmate.memory_limit, "present_bytes", present)
    trained_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    room = frozen_bytes(model) // 3
    limit: dict[str, Any] = {"memory_limit": others + 2 * trained_bytes + room, "optimizer": "sgd"}
    home: dict[str, Any] = {"offload": f"disk:{tmp_path}", **QUICK}
    for further in ({**home, "weights": "resident"}, QUICK):
        with pytest.raises(
            InfeasibleMemoryLimitError, match=r"are frozen weights, which weights='auto'.*offload="
        ):
            RockmateModule(model, rows(), **limit, **further)
    with caplog.at_level("WARNING", "rockmate.planning.options"):
        module = RockmateModule(model, rows(), **limit, **home)
    assert "frozen weights may be at home in disk:" in caplog.text
    assert module.plan.schedule.fetches
    assert module.plan.budget_bytes <= room
    same_step(module, eager, rows(1))


def test_a_fit_counts_the_weights_that_stay() -> None:
    model = layers()
    options: dict[str, Any] = {
        "machine": "rtx4090", "offload": "host", "optimizer": "sgd", "reserve": 0, "most": 40,
        "sizes": [40], "numerics": "bitwise",
    }  # fmt: skip
    memory = frozen_bytes(model) // 2 + 400_000
    with pytest.raises(NothingFitsError, match="offload, with"):
        fit(model, rows(), memory, **options | {"offload": None})
    with pytest.raises(NothingFitsError):
        fit(model, rows(), memory, weights="resident", **options)
    row = fit(model, rows(), memory, **options).rows[-1]
    assert row.batch_size == 40
    assert row.total_bytes <= memory
    assert row.parameter_bytes < frozen_bytes(model) <= row.parameter_bytes + row.host_bytes


def test_homes_of_a_gpu_are_planned_on_a_cpu() -> None:
    model = layers()
    home: dict[str, Any] = {"offload": "host", "weights": "auto", **QUICK}
    plan = Planner(model, rows(), machine="rtx4090", **home).plan(frozen_bytes(model) // 2)
    assert plan.schedule.fetches
    assert plan.predicted_ms >= plan.lower_bound_ms
    with pytest.raises(OffloadError, match=r"this model is on cpu"):
        RockmateModule(model, rows(), frozen_bytes(model) // 2, **home)
