"""Runs a training script twice, plain and with its models wrapped, and compares every number.

A script is a function of `wrap`, which it calls once on each model that it trains. It returns what
it would log and save: losses, and the modules that it has trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from helpers import same_bits
from torch import Tensor, nn

from rockmate import RockmateModule

Wrap = Callable[[nn.Module], nn.Module]
Numbers = Sequence[float | Tensor | nn.Module]
Script = Callable[[Wrap], Numbers]


def wrapped(model: nn.Module, **options: Any) -> nn.Module:
    """The line that a user adds: plans from the first batch, within about half of the peak."""
    settings = {"budget": 0.6, "on_infeasible": "least"} | options
    return RockmateModule(model, None, **settings)


def numbers_of(script: Script, wrap: Wrap) -> dict[str, Tensor]:
    """All numbers of a run: what the script logs, then parameters, gradients and buffers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    numbers: dict[str, Tensor] = {}
    for index, value in enumerate(script(wrap)):
        if isinstance(value, nn.Module):
            for name, each in value.named_parameters():
                numbers[f"{index}.{name}"] = each.detach().clone()
                numbers[f"{index}.{name}.grad"] = (
                    torch.empty(0) if each.grad is None else each.grad.clone()
                )
            numbers |= {f"{index}.{name}": each.clone() for name, each in value.named_buffers()}
        else:
            numbers[f"{index}"] = torch.as_tensor(value).detach().clone()
    return numbers


def differences(script: Script, wrap: Wrap = wrapped) -> list[str]:
    """Names of the numbers that are not the same bits with wrapped models.

    A script whose numbers are those of modules ends with gradients.
    """
    plain, ours = numbers_of(script, lambda model: model), numbers_of(script, wrap)
    assert plain.keys() == ours.keys()
    gradients = [each for name, each in plain.items() if name.endswith(".grad")]
    assert not gradients or any(each.numel() for each in gradients)
    return [name for name in plain if not same_bits(ours[name], plain[name])]
