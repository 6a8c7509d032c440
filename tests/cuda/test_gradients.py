"""Planned steps on a GPU give eager's gradients: with dropout, in each precision, by each kernel of
attention, on another stream and on a second device.

Kernels that add with atomics differ from run to run. So the tolerance is a multiple of the
difference between two eager runs, and of the precision of the dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.models import built, makers
from rockmate import Planner, RockmateModule

EPSILONS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Attention(nn.Module):
    """Two layers of attention with dropout, and a loss over an embedding's rows."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 3 * 128) for _ in range(2))
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            parts = layer(hidden).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts, dropout_p=self.dropout)
            hidden = hidden + functional.dropout(mixed.transpose(1, 2).flatten(-2), self.dropout)
        return hidden.float().square().mean()


def gradients(
    call: Callable[..., Any],
    owner: nn.Module,
    arguments: dict[str, Any],
    *,
    is_autocast: bool = False,
) -> dict[str, Tensor]:
    owner.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    device = next(owner.parameters()).device.type
    # The backward runs outside of autocast, as PyTorch recommends.
    with torch.autocast(device, torch.bfloat16) if is_autocast else contextlib.nullcontext():
        output = call(**arguments)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    named = owner.named_parameters()
    return {name: each.grad.double().cpu() for name, each in named if each.grad is not None}


def assert_equal_gradients(
    model: nn.Module, module: RockmateModule, batch: dict[str, Any], *, is_autocast: bool = False
) -> None:
    assert module.plan.schedule.num_recomputations() > 0
    reference, repeated, ours = (
        gradients(call, model, batch, is_autocast=is_autocast) for call in (model, model, module)
    )
    assert ours.keys() == reference.keys()
    scale = max(each.norm().item() for each in reference.values())
    epsilon = EPSILONS[torch.bfloat16 if is_autocast else next(model.parameters()).dtype]
    for name, expected in reference.items():
        noise = (repeated[name] - expected).norm().item()
        difference = (ours[name] - expected).norm().item()
        assert difference <= 3 * noise + epsilon * max(expected.norm().item(), 0.01 * scale), name


def tight(model: nn.Module, batch: dict[str, Any]) -> RockmateModule:
    planner = Planner(model, batch)
    return planner.module(planner.minimum_peak_bytes)


def tokens_on(device: torch.device) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {"tokens": torch.randint(0, 2000, (16, 256), generator=draw).to(device)}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_of_attention(device: torch.device, kernel: str, dropout: float) -> None:
    if device.type == "cpu" and kernel != "math":
        pytest.skip("the CPU has no such kernel")
    model = Attention(dropout).to(device, torch.bfloat16).train()
    batch = tokens_on(device)
    with sdpa_kernel(KERNELS[kernel]):
        assert_equal_gradients(model, tight(model, batch), batch)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "autocast"])
def test_each_precision(device: torch.device, form: str) -> None:
    dtype = torch.float32 if form == "autocast" else getattr(torch, form)
    model, batch = Attention(0.1).to(device, dtype).train(), tokens_on(device)
    is_autocast = form == "autocast"
    with torch.autocast(device.type, torch.bfloat16) if is_autocast else contextlib.nullcontext():
        module = tight(model, batch)
    assert_equal_gradients(model, module, batch, is_autocast=is_autocast)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", sorted(makers("gpu")))
def test_small_variants_of_published_models(device: torch.device, name: str) -> None:
    pytest.importorskip("peft" if name == "llama-8b-lora" else "torch")
    pytest.importorskip("diffusers" if name == "sdxl-unet" else "torch")
    if name == "whisper-medium":  # before, it reads a random number, even if no layer is dropped
        pytest.importorskip("transformers", minversion="5.20")
    make = makers("gpu")[name]
    workload = built(name, make, tiny=True, device=device, dtype=torch.bfloat16)
    model, batch = workload.model, workload.sample
    planner = Planner(model, batch)
    module = planner.module(planner.minimum_peak_bytes)
    if module.plan.schedule.num_recomputations():
        assert_equal_gradients(model, module, batch)


def test_forward_on_another_stream(cuda: torch.device) -> None:
    model, batch = Attention(0.0).to(cuda).train(), tokens_on(cuda)
    module = tight(model, batch)
    stream = torch.cuda.Stream(cuda)

    def on_stream(**arguments: Any) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream(cuda))
        with torch.cuda.stream(stream):
            return module(**arguments)

    reference = gradients(model, model, batch)
    for _ in range(5):
        found = gradients(on_stream, model, batch)
        for name, expected in reference.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-6)


def test_a_second_device(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    second = torch.device("cuda", 1)
    model, batch = Attention(0.1).to(second).train(), tokens_on(second)
    module = tight(model, batch)
    assert module.plan.predicted_ms > 0
    assert_equal_gradients(model, module, batch)
