"""What of a model is trained: all, adapters beside frozen weights (LoRA), or all but some parts."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from rockmate.extras import require
from rockmate.hf.source_check import ModelSourceError
from rockmate.memory_limit import device_of

_DEFAULT_TARGETS = "all-linear"


def with_lora(model: nn.Module, *, rank: int, targets: Sequence[str] = ()) -> nn.Module:
    """A model whose weights are frozen, with LoRA adapters (Hu et al. 2021) that are trained.

    Args:
        model: a transformers model, on any device.
        rank: of the adapters.
        targets: names of the linear layers that get one; none takes all but the output layer.

    Raises:
        ModelSourceError: PEFT finds no such layers, or does not know the model.
        MissingExtraError: PEFT is not installed.
    """
    peft: Any = require("peft", extra="hf", purpose="LoRA")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(targets) or _DEFAULT_TARGETS,
        fan_in_fan_out=any(type(each).__name__ == "Conv1D" for each in model.modules()),
        init_lora_weights=device_of(model).type != "meta",
    )
    try:
        with torch.random.fork_rng(devices=[]), device_of(model):
            adapted = peft.get_peft_model(model, config)
    except (ValueError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split()).removesuffix(".")
        raise ModelSourceError(
            f"PEFT cannot adapt {type(model).__name__}: {text}. Name its linear layers: "
            "--lora-targets q_proj,v_proj, say."
        ) from error
    return adapted.train()


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Freezes the parameters at some paths and gives their number of elements.

    Args:
        model: the model; `requires_grad` of its parameters is changed.
        patterns: paths of submodules or parameters; `*` stands for any text.

    Raises:
        ModelSourceError: a pattern fits no parameter, or none is left to train.
    """
    frozen = 0
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        found = [name for name in parameters if _fits(name, pattern)]
        if not found:
            paths = [*parameters, *(path for path, _ in model.named_modules() if path)]
            near = difflib.get_close_matches(pattern, paths, n=3)
            hint = f"Near are {', '.join(near)}." if near else f"They begin with {paths[0]}."
            raise ModelSourceError(f"--frozen {pattern!r} fits no parameter of the model. {hint}")
        for name in found:
            frozen += parameters[name].numel() * parameters[name].requires_grad
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelSourceError(
            f"--frozen {','.join(patterns)} leaves nothing to train. Leave a part out of it."
        )
    return frozen


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
