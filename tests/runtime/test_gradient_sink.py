"""The sparse gradient of an embedding: numbered tokens give the rows of the dense gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rockmate.runtime import gradient_sink
from rockmate.runtime.gradient_sink import GradientSink

NUM_WEIGHTS, WIDTH = 50, 3
INDICES = {
    "repeated": torch.tensor([[7, 3, 7], [49, 3, 7]]),
    "with token 0": torch.tensor([[0, 3, 0], [1, 0, 2]]),
    "without token 0": torch.tensor([[4, 5, 6]]),
    "one": torch.tensor([[11]]),
    "random": torch.randint(0, NUM_WEIGHTS, (4, 9), generator=torch.Generator().manual_seed(0)),
}


def accumulated(indices: Tensor, gradient: Tensor, padding_idx: int) -> Tensor:
    weight = nn.Parameter(torch.ones(NUM_WEIGHTS, WIDTH, dtype=gradient.dtype))
    weight.grad = torch.full_like(weight, 0.25)
    sink = GradientSink({"weight": weight})
    sink.accumulate_embedding("weight", gradient, indices, NUM_WEIGHTS, padding_idx, is_final=False)
    return weight.grad


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("name", INDICES)
def test_numbering_on_the_device_gives_the_dense_gradient(
    monkeypatch: pytest.MonkeyPatch, name: str, padding_idx: int
) -> None:
    indices = INDICES[name]
    gradient = torch.randn(*indices.shape, WIDTH, dtype=torch.float64)
    dense = torch.ops.aten.embedding_dense_backward(
        gradient, indices, NUM_WEIGHTS, padding_idx, False
    )
    by_unique = accumulated(indices, gradient, padding_idx)
    torch.testing.assert_close(by_unique, dense + 0.25, rtol=1e-12, atol=0)
    monkeypatch.setattr(gradient_sink, "_numbered", gradient_sink._numbered_on_device)
    assert torch.equal(accumulated(indices, gradient, padding_idx), by_unique)


def test_numbering_on_the_device_reads_no_value_on_the_host() -> None:
    with FakeTensorMode():
        tokens, numbers = gradient_sink._numbered_on_device(torch.ones(2, 3, dtype=torch.long))
    assert tokens.shape == (6,)
    assert numbers.shape == (2, 3)
