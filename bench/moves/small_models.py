"""The architectures of the benchmark at a size that one CPU thread steps in a few tenths of a second.

Their values are large enough to be worth a copy each: some hundred kB to some MB.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.models import REGISTRY, Workload, batches, build, images, plain, text

_gpt2 = partial(text.gpt2, num_layers=4, width=384, heads=6, vocabulary=1024, shape=(4, 256))
_rotary = partial(
    text.rotary, width=384, heads=6, key_value_heads=2, inner=1024, vocabulary=1024, shape=(4, 256)
)


def _mlp(name: str, tiny: bool, device: torch.device) -> Workload:
    shape = (2048, 384)
    return Workload(
        name=name,
        model=plain.prepared(plain.MLP(16, shape[1]), device),
        layers=lambda model: list(model.layers),  # pyright: ignore
        loss=plain.outside_squared_error,
        make_batch=partial(
            batches.regression_vectors, shape=shape, name="x", target_shape=shape, device=device
        ),
    )


SMALL: dict[str, Callable[[str, bool, torch.device], Workload]] = {
    "gpt2": _gpt2,
    "bert": partial(
        text.bert,
        head="masked",
        num_layers=4,
        width=384,
        heads=6,
        vocabulary=1024,
        shape=(4, 256),
    ),
    "llama": partial(_rotary, kind="Llama", num_layers=4),
    "llama-lora": partial(_rotary, kind="Llama", num_layers=4, adapter_rank=8),
    "qwen3": partial(_rotary, kind="Qwen3", num_layers=4),
    "qwen3-moe": partial(_rotary, kind="Qwen3Moe", num_layers=3, experts=4),
    "t5": partial(
        text.t5, num_layers=3, width=256, heads=4, inner=1024, shape=(4, 256), labels_shape=(4, 64)
    ),
    "vit": partial(images.vit, width=192, heads=3),
    "resnet": partial(images.resnet, depths=(2, 2, 2, 2), batch=4, pixels=96),
    "regnet": partial(
        images.staged,
        kind="RegNet",
        widths=[64, 128, 320],
        depths=[1, 2, 2],
        batch=8,
        pixels=160,
        embedding_size=32,
        groups_width=16,
        layer_type="y",
        small={},
    ),
    "convnext": partial(
        images.staged,
        kind="ConvNext",
        widths=[48, 96, 192, 384],
        depths=[2, 2, 4, 2],
        batch=8,
        pixels=128,
        image_size=128,
        num_stages=4,
        small={},
    ),
    "unet": partial(images.unet, base_width=24, batch=2, pixels=128),
    "mlp": _mlp,
    "encoder": partial(plain.encoder, num_layers=6, width=256, heads=4, shape=(4, 256)),
}
"""Name to builder; a builder takes (name, tiny, device), as in the registry."""

BRANCHED = ("bart", "two-streams", "densenet")
"""Models of the registry that are measured beside them, as they are there."""


def small_workload(name: str) -> Workload:
    """The small model of that name, or the registry's, with its loss inside.

    Raises:
        ValueError: neither has one.
    """
    if name not in SMALL:
        if name not in REGISTRY:
            msg = f"unknown model {name!r}; known are {', '.join([*SMALL, *sorted(REGISTRY)])}"
            raise ValueError(msg)
        return build(name).with_loss_inside()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SMALL[name](name, False, torch.device("cpu")).with_loss_inside()
