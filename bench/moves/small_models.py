"""The architectures of the benchmark at a size that one CPU thread steps in a few tenths of a second.

Their values are large enough to be worth a copy each: some hundred kB to some MB.
"""  # noqa: E501

from __future__ import annotations

from functools import partial

from bench.models import REGISTRY, Workload, build, images, plain, text
from bench.models.registry import Maker, built

_rotary = partial(
    text.rotary, width=384, heads=6, shared_heads=2, inner=1024, words=1024, shape=(4, 256)
)
SMALL: dict[str, Maker] = {
    "gpt2": partial(text.gpt2, layers=4, width=384, heads=6, words=1024, shape=(4, 256)),
    "bert": partial(
        text.bert, head="MaskedLM", layers=4, width=384, heads=6, words=1024, shape=(4, 256)
    ),
    "llama": partial(_rotary, kind="Llama", layers=4),
    "llama-lora": partial(_rotary, kind="Llama", layers=4, rank=8),
    "qwen3": partial(_rotary, kind="Qwen3", layers=4),
    "qwen3-moe": partial(_rotary, kind="Qwen3Moe", layers=3, experts=4),
    "t5": partial(
        text.t5, layers=3, width=256, heads=4, inner=1024, source=(4, 256), target=(4, 64)
    ),
    "vit": partial(images.vit, width=192, heads=3),
    "resnet": partial(images.resnet, depths=(2, 2, 2, 2), batch=4, pixels=96),
    "regnet": partial(
        images.staged, kind="RegNet", widths=[64, 128, 320], depths=[1, 2, 2], pixels=160,
        embedding_size=32, groups_width=16, layer_type="y", small={},
    ),
    "convnext": partial(
        images.staged, kind="ConvNext", widths=[48, 96, 192, 384], depths=[2, 2, 4, 2], pixels=128,
        image_size=128, num_stages=4, small={},
    ),
    "unet": partial(images.unet, base_width=24, batch=2, pixels=128),
    "mlp": partial(plain.mlp, layers=16, width=384, rows=2048),
    "encoder": partial(plain.encoder, layers=6, width=256, heads=4, shape=(4, 256)),
}  # fmt: skip
BRANCHED = ("bart", "two-streams", "densenet")
"""Models of the registry that are measured beside them, as they are there."""


def small_workload(name: str) -> Workload:
    """The small model of that name, or the registry's, with its loss inside.

    Raises:
        ValueError: neither has one.
    """
    if name in SMALL:
        return built(name, SMALL[name]).with_loss_inside()
    if name not in REGISTRY:
        msg = f"unknown model {name!r}; known are {', '.join([*SMALL, *sorted(REGISTRY)])}"
        raise ValueError(msg)
    return build(name).with_loss_inside()
