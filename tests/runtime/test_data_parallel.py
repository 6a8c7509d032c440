"""`nn.DataParallel` is refused with advice: its replicas would share one plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from rockmate import RockmateModule, UnsupportedModelError, wrap_trainer


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def test_replicas_are_refused() -> None:
    module: Any = RockmateModule(model(), torch.randn(2, 4), budget=1.0)
    with pytest.raises(UnsupportedModelError, match="torchrun"):
        module._replicate_for_data_parallel()


def test_a_model_inside_data_parallel_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="torchrun"):
        RockmateModule(nn.DataParallel(model()), torch.randn(2, 4), budget=1.0)


def test_a_trainer_that_would_replicate_is_refused() -> None:
    trainer = SimpleNamespace(
        model=model(),
        args=SimpleNamespace(n_gpu=2, optim="adamw"),
        compute_loss_func=None,
        optimizer=None,
    )
    with pytest.raises(UnsupportedModelError, match="torchrun"):
        wrap_trainer(cast(Any, trainer), 0.5)
