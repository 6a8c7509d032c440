"""Each interface that a capture relies on is tried, and one that misses is an error by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.aot_autograd
import torch.utils.checkpoint
import transformers.masking_utils
from torch import nn

from rockmate import RockmateModule, UntestedVersionError
from rockmate._torch import aot, dispatch, engine, fake, functions, graphs
from rockmate.capture import behaviour


@contextlib.contextmanager
def does_nothing(*_: Any, **__: Any) -> Iterator[Any]:
    yield


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(behaviour, "_passed", set())
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_installed_versions_behave(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)  # as Lightning's "bf16-true" does
    state = torch.get_rng_state()
    behaviour.check_behaviour()
    assert behaviour._passed == behaviour._CHECKS.keys()
    assert torch.equal(torch.get_rng_state(), state)


# What a release could do to each interface: a call goes elsewhere, or has another effect.
MASKS = "transformers.masking_utils.create_causal_mask"
PLANTED = {
    "torch.utils.checkpoint.checkpoint": (
        torch.utils.checkpoint, "checkpoint", lambda run, *args, **_: run(*args)
    ),
    "torch.autograd.Function.apply": (functions, "_foreign_functions", list),
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors": (
        torch._functorch.aot_autograd, "aot_export_joint_with_descriptors", does_nothing
    ),
    "torch.compiler.is_compiling": (torch.compiler, "is_compiling", lambda: False),
    "torch.fx.proxy.TracerBase.create_node": (graphs, "on_node_created", does_nothing),
    "torch.nn.functional.interpolate": (aot, "without_decompositions", does_nothing),
    "torch._subclasses.fake_tensor.FakeTensorMode.dispatch": (
        fake, "results_corrected", does_nothing
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": (dispatch, "ops_observed", does_nothing),
    "torch.autograd.Variable._execution_engine": (
        engine, "accumulate", lambda leaves, *_: torch.autograd.backward(leaves, [None])
    ),
    "torch._C._autograd._enable_profiler_legacy": (
        behaviour, "peak_beyond_result", lambda run, device: len([run()])
    ),
    "torch.manual_seed": (behaviour, "no_random_state_set", does_nothing),
    MASKS: (behaviour, "known_masks", does_nothing),
}  # fmt: skip


@pytest.mark.parametrize("name", list(behaviour._CHECKS))
def test_one_that_misses_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, planted = PLANTED[name]
    monkeypatch.setattr(owner, attribute, planted)
    with pytest.raises(UntestedVersionError, match="ROCKMATE_SKIP_CHECK=1") as caught:
        behaviour.check_behaviour()
    assert caught.value.name == name
    version = transformers.__version__ if name.startswith("transformers") else torch.__version__
    assert f"{name.partition('.')[0]} {version}" in str(caught.value)


def test_a_capture_tries_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    checks = {name: lambda name=name: tried.append(name) for name in behaviour._CHECKS}
    monkeypatch.setattr(behaviour, "_CHECKS", checks)
    monkeypatch.setattr(
        behaviour, "_masks", checks["transformers.masking_utils.create_causal_mask"]
    )
    for _ in range(2):
        RockmateModule(nn.Linear(2, 2), torch.ones(1, 2), 1.0)
    assert tried == list(checks)


def test_a_capture_on_a_version_that_misses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_foreign_functions", list)
    with pytest.raises(UntestedVersionError, match=r"torch\.autograd\.Function\.apply"):
        RockmateModule(nn.Linear(2, 2), torch.ones(1, 2), 1.0)
    monkeypatch.setenv("ROCKMATE_SKIP_CHECK", "1")
    RockmateModule(nn.Linear(2, 2), torch.ones(1, 2), 1.0)
