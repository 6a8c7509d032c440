"""What must not change: wrapping and planning leave no trace, and the planned module is otherwise
the original."""

from __future__ import annotations

import copy
import random
from typing import Any

import models
import numpy as np
import pytest
import torch
from helpers import (
    REGIMES,
    assert_alike,
    budget_for,
    differing,
    gradients_of,
    modules_of,
    planned,
    tensors_of,
)
from torch import nn

from rockmate import Planner, RockmateModule, SignatureMismatchError

HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


def settings() -> dict[str, Any]:
    return {
        "torch generator": torch.get_rng_state().tolist(),
        "numpy generator": np.random.get_state(legacy=True)[1].tolist(),
        "python generator": random.getstate(),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "compiling": torch.compiler.is_compiling(),
        "exporting": torch.compiler.is_exporting(),
        "compile flags": (torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "sdp": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "mkldnn": torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled(),
        "donated": torch._functorch.config.donated_buffer,
        "dispatch modes": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    }


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "values": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "identities": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "versions": [tensor._version for tensor in (*model.parameters(), *model.buffers())],
        "names": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "gradients": gradients_of(model),
        "modes": [module.training for module in model.modules()],
        "trainable": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [
            [dict(getattr(module, name)) for name in HOOKS if hasattr(module, name)]
            for module in model.modules()
        ],
        "tensor hooks": [dict(p._backward_hooks or {}) for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "children": [id(module) for module in model.modules()],
    }


def assert_same_state(now: dict[str, Any], before: dict[str, Any]) -> None:
    for key in before:
        if key in ("values", "gradients"):
            assert not differing(now[key], before[key]), key
        else:
            assert now[key] == before[key], key


@pytest.mark.parametrize("name", models.TINY)
def test_planning_and_wrapping_leave_no_trace(name: str) -> None:
    workload = models.tiny(name)
    model, sample = workload.model, workload.sample
    # some have a gradient, some are frozen, some a hook
    for index, parameter in enumerate(model.parameters()):
        if index % 3 == 0:
            parameter.grad = torch.full_like(parameter, 0.5)
        elif index % 5 == 1:
            parameter.requires_grad_(False)
    kinds = nn.Dropout | nn.LayerNorm | nn.BatchNorm2d | nn.Linear
    next(module for module in model.modules() if isinstance(module, kinds)).eval()
    handle = model.register_forward_hook(lambda module, inputs, output: None)
    masking = __import__("transformers").masking_utils
    functions = {key: value for key, value in vars(masking).items() if callable(value)}
    if hasattr(model, "config"):
        model.config.problem_type = (
            "single_label_classification"  # else the model's own forward writes it there
        )
    config = copy.deepcopy(vars(model.config)) if hasattr(model, "config") else None
    sample_before = {key: value.clone() for key, value in sample.items()}
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    before, settings_before = state_of(model), settings()
    planner = Planner(model, sample)
    planner.frontier()
    for regime in REGIMES:
        planner.module(budget_for(planner, regime))
    assert settings() == settings_before
    assert_same_state(state_of(model), before)
    assert {key: value for key, value in vars(masking).items() if callable(value)} == functions
    assert config is None or vars(model.config) == config
    assert not differing(sample, sample_before)
    handle.remove()


def test_failed_planning_leaves_no_trace_either() -> None:
    class Picky(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if y.sum() > 0 else -y

    model = Picky()
    before, settings_before = state_of(model), settings()
    with pytest.raises(ValueError, match="Picky"):
        Planner(model, torch.randn(2, 16, generator=torch.Generator().manual_seed(1)))
    assert settings() == settings_before
    assert_same_state(state_of(model), before)


def test_global_settings_of_the_user_survive_a_planned_step() -> None:
    module = planned("gpt2").module("minimum")
    batch = planned("gpt2").workload.make_batch(1)
    before = {key: value for key, value in settings().items() if key != "torch generator"}
    module(**batch).loss.backward()
    assert {key: value for key, value in settings().items() if key != "torch generator"} == before


def test_it_is_the_original_to_the_outside() -> None:
    workload = models.tiny("gpt2")
    model = workload.model
    module = RockmateModule(model, workload.sample, 0.7)
    assert list(module.state_dict()) == list(model.state_dict())
    assert [id(p) for p in module.parameters()] == [id(p) for p in model.parameters()]
    assert [name for name, _ in module.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert [name for name, _ in module.named_buffers()] == [
        name for name, _ in model.named_buffers()
    ]
    assert [name for name, _ in module.named_modules()][1:] == [
        name for name, _ in model.named_modules()
    ][1:]
    assert module.config is model.config
    assert module.transformer is model.transformer
    assert module.device == model.device
    assert module.num_parameters() == model.num_parameters()
    assert "generate" in dir(module)
    assert module.get_submodule("transformer.h.0") is model.transformer.h[0]
    with pytest.raises(AttributeError, match="no_such_thing"):
        module.no_such_thing  # noqa: B018
    assert "budget" in repr(module)


def test_special_methods_are_those_of_the_model_and_of_no_other() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    module = RockmateModule(model, torch.randn(3, 4), 1.0)
    assert [id(each) for each in module] == [id(each) for each in model]
    assert (len(module), module[0], module[-1]) == (3, model[0], model[2])
    assert module[2] in module
    module[2] = nn.Linear(8, 3)
    assert model[2].out_features == 3
    module.append(nn.Tanh())
    assert len(model) == 4
    assert module(torch.randn(3, 4)).shape == (3, 3)
    twin = copy.deepcopy(module)
    assert len(twin) == 4
    assert isinstance(twin, nn.Sequential)
    assert isinstance(twin, RockmateModule)
    other = RockmateModule(nn.Linear(4, 2), torch.randn(3, 4), 1.0)
    assert type(other) is RockmateModule
    with pytest.raises(TypeError, match="not subscriptable"):
        other[0]  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_after_planning_are_the_ones_that_train(assign: bool) -> None:
    model, other = models.Stack(), models.Stack()
    x = torch.randn(64, 16)
    for module in modules_of(model, x):
        module.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        torch.manual_seed(1)
        module(x).sum().backward()
        torch.manual_seed(1)
        other.zero_grad()
        other(x).sum().backward()
        assert not differing(gradients_of(model), gradients_of(other))
        model.zero_grad()


def test_casting_the_module_is_noticed_in_training_and_works_in_eval() -> None:
    model = models.Stack()
    x = torch.randn(64, 16)
    module = RockmateModule(model, x, 0.8, replan=False)
    module.to(torch.float64)
    assert model.layers[0][0].weight.dtype is torch.float64
    with pytest.raises(SignatureMismatchError, match="float64"):
        module(x.double())
    module.eval()
    assert module(x.double()).dtype is torch.float64
    module.train()
    module.to(torch.float32)
    module(x).sum().backward()
    assert model.layers[0][0].weight.grad.dtype is torch.float32


@pytest.mark.parametrize("name", models.TINY)
def test_eval_and_no_grad_run_the_original(name: str) -> None:
    case = planned(name)
    module, model = case.module("minimum"), case.workload.model
    sample = case.workload.sample
    module.eval()
    assert not any(inner.training for inner in model.modules())
    assert_alike(tensors_of(module(**sample)), tensors_of(model(**sample)))
    module.train()
    assert all(inner.training for inner in model.modules())
    results = []
    for callee in (module, model):
        model.load_state_dict(case.before)
        torch.manual_seed(3)
        with torch.no_grad():
            results.append(tensors_of(callee(**sample)))
        results[-1].append(torch.get_rng_state())
    assert_alike(*results)


def test_eval_takes_any_shape_and_has_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = models.Stack()
    module = RockmateModule(model, torch.randn(64, 16), 0.8).eval()
    x = torch.randn(7, 3, 16, requires_grad=True)
    with torch.no_grad():
        module(x)
    assert "without the budget" not in caplog.text
    for _ in range(2):
        module(x).sum().backward()
    assert x.grad is not None
    assert caplog.text.count("without the budget") == 1
    assert module.training is False
    with torch.inference_mode():
        module.train()(torch.randn(2, 16))
