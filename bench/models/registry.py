"""The workloads by name, which of them the pages show, and how one is built."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.models.architectures import made, of_folder
from bench.models.batches import seeded_generator
from bench.models.workload import Made, Workload, modules_at, own_loss

Maker = Callable[..., Made]
"""`make(tiny)` makes a model, or its variant for tests; keywords replace what the table says."""


def makers(name: str) -> dict[str, Maker]:
    """The makers of the models in the file NAME.toml of this folder; registry.toml explains it."""
    path = Path(__file__).parent
    content = tomllib.loads((path / f"{name}.toml").read_text(encoding="utf-8"))
    all_tiny = tomllib.loads((path / "registry.toml").read_text(encoding="utf-8"))["tiny"]
    all_tiny |= content.pop("tiny", {})
    names = [each for each in content if not each.startswith("_")]
    return {each: partial(_make, _fields(content, each), all_tiny) for each in names}


def _fields(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of an entry, with those of the entries that it is like."""
    own = dict(content[name])
    base = _fields(content, own.pop("like")) if "like" in own else {}
    return base | own | {"tiny": base.get("tiny", {}) | own.get("tiny", {})}


def _make(
    fields: Mapping[str, Any], all_tiny: Mapping[str, Any], tiny: bool, **others: Any
) -> Made:
    arguments = {**fields, **others}
    where, own_tiny = arguments.pop("make"), arguments.pop("tiny")
    if tiny:
        arguments |= all_tiny.get(where, {}) | own_tiny
    return of_folder(where)(**arguments) if "." in where else made(where, **arguments)


def build(
    name: str, *, tiny: bool = False, device: str | torch.device = "cpu", seed: int = 0
) -> Workload:
    """The workload of that name, with weights drawn from `seed`.

    The global random state is left alone.

    Raises:
        ValueError: There is no such workload.
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(sorted(REGISTRY))}")
    return built(name, REGISTRY[name], tiny=tiny, device=device, seed=seed)


def built(
    name: str,
    make: Maker,
    *,
    tiny: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Workload:
    """The same of a maker; weights and values of batches have the dtype."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                own = make(tiny)
        finally:
            torch.set_default_dtype(default)

    def placed(value: Tensor) -> Tensor:
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    def make_batch(seed: int, rows: int = own.rows) -> dict[str, Tensor]:
        batch = own.make_batch(seeded_generator(seed), rows)
        return {key: placed(value) for key, value in batch.items()}

    return Workload(
        name=name,
        model=own.model.to(device).train(),
        layers=partial(modules_at, patterns=own.layers),
        stages=partial(modules_at, patterns=own.stages) if own.stages else None,
        loss=own.loss or own_loss,
        make_batch=make_batch,
        rows=own.rows,
    )


REGISTRY = makers("registry")
"""Name to maker."""

BRANCHED = (
    "t5-small", "t5-12", "bart", "whisper", "transformer", "clip", "unet", "conditional-unet",
    "two-streams", "densenet", "hrnet", "segformer", "llava",
)  # fmt: skip
"""Models whose step is not a chain of blocks."""

COMPARED = (
    "gpt2-deep", "gpt2-1row", "bert-narrow", "llama", "t5-small", "llama-lora", "encoder-deep",
    "encoder-wide", "vit-small", "resnet50", "resnet101", "regnet", "unet",
)  # fmt: skip
"""Models on which all methods are compared."""
