"""Data-parallel training, in a group of one: the reducer's hooks fire once a parameter and gradients are eager's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import torch
from helpers import assert_same, modules_of, train
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo")
def test_data_parallel(group: None) -> None:
    x = torch.randn(64, 16)
    model = models.Stack()

    def loss_of(module: nn.Module, step: int) -> tuple[None, torch.Tensor]:
        return None, module(x * step).square().mean()

    reference_model = copy.deepcopy(model)
    reference = train(DistributedDataParallel(reference_model), reference_model, loss_of)
    before = copy.deepcopy(model.state_dict())
    for gradients in ("accumulated", "returned"):
        for module in modules_of(model, x, gradients=gradients):
            model.load_state_dict(before)
            model.zero_grad(set_to_none=True)
            parallel = DistributedDataParallel(module)
            for ours, theirs in zip(train(parallel, model, loss_of), reference, strict=True):
                assert_same(ours, theirs)
