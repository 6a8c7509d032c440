"""Slices of gradients, and storages, have the sizes that suit their device and its allocator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate import RockmateModule
from rockmate.costs.estimate import estimate_costs
from rockmate.costs.machine import load_machine
from rockmate.graph.ir import SlicedMatmul
from rockmate.ops.kernels import CHUNK_BYTES, CUDA_CHUNK_BYTES, chunk_rows
from rockmate.planning.step import CapturedStep, capture_step

MIB = 1 << 20


class Wide(nn.Module):
    """Weights of 64 and 256 MiB and a loss over 8192 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2048, 8192, bias=False), nn.Linear(8192, 8192, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.down(torch.relu(self.up(x))), labels)


def step_on(machine: str) -> CapturedStep:
    with torch.device("meta"):
        model = Wide().train()
        sample = (torch.empty(8192, 2048), torch.empty(8192, dtype=torch.long))
    return capture_step(model, sample, machine=load_machine(machine))


@pytest.mark.parametrize(("machine", "rows"), [("cpu-avx2", 512), ("h200", 2048)])
def test_slices_suit_the_device(machine: str, rows: int) -> None:
    """As many rows as a product needs to be fast, or as many as have the bytes of a slice."""
    step = step_on(machine)
    sliced = [op for op in step.graph.ops if isinstance(op.gradient_sink_form, SlicedMatmul)]
    assert len(sliced) == 2
    enough_bytes = 32 * MIB if machine == "h200" else 2 * MIB
    assert sorted(op.writes[0].num_bytes for op in sliced) == [
        max(enough_bytes, 4 * rows * width) for width in (2048, 8192)
    ]


def test_chunks_of_the_cross_entropy_gradient_suit_the_device() -> None:
    scores = torch.empty(8192, 8192, device="meta")
    assert chunk_rows(scores) == CHUNK_BYTES // (4 * 8192)
    step = step_on("h200")
    (op,) = (op for op in step.graph.ops if "cross_entropy_backward" in op.name)
    assert chunk_rows(op.node.meta["val"]) == CUDA_CHUNK_BYTES // (4 * 8192)
    machine = load_machine("h200")
    cost = estimate_costs(step.graph, machine).first[op.index]
    assert cost.overhead_bytes == 2 * CUDA_CHUNK_BYTES
    num_chunks = 4 * 8192 * 8192 // CUDA_CHUNK_BYTES
    assert cost.time_ms > 2 * num_chunks * machine.launch_ms


def test_slices_of_rows_give_eagers_gradient() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(1024, 1024, bias=False).train(), torch.randn(64, 1024)
    module = RockmateModule(model, x, 1.0)
    step = capture_step(model, x)
    (form,) = (op.gradient_sink_form for op in step.graph.ops if op.gradient_sink_form)
    assert isinstance(form, SlicedMatmul)
    assert (form.dim, form.slice_size) == (0, 512)
    expected = torch.autograd.grad(model(x).square().mean(), model.weight)[0]
    module(x).square().mean().backward()
    assert torch.equal(model.weight.grad, expected)


@pytest.mark.parametrize(("machine", "granularity"), [("cpu-avx2", 1), ("h200", 512)])
def test_storages_have_the_allocators_sizes(machine: str, granularity: int) -> None:
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)).train()
    step = capture_step(model, torch.randn(11, 3), machine=load_machine(machine))
    (hidden,) = (op.writes[0] for op in step.graph.ops if op.name == "tanh")
    assert hidden.num_bytes == -(-11 * 7 * 4 // granularity) * granularity
    counted = [storage for storage in step.graph.storages if not storage.is_static]
    assert all(storage.num_bytes % granularity == 0 for storage in counted)
