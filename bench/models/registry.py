"""The workloads by name, and which of them the pages show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.models import images, plain, text
from bench.models.batches import seeded_generator
from bench.models.branched_images import densenet, hrnet, segformer
from bench.models.diffusion import conditional_unet, two_streams
from bench.models.encoder_decoders import bart, t5_narrow, transformer, whisper
from bench.models.towers import clip, llava
from bench.models.workload import Made, Workload, modules_at, own_loss

Maker = Callable[[bool], Made]
"""Makes a model, or its tiny variant."""


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
    seed: int = 0,
) -> Workload:
    """The same of a maker."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = make(tiny)
    return Workload(
        name=name,
        model=made.model.to(device).train(),
        layers=partial(modules_at, patterns=made.layers),
        stages=partial(modules_at, patterns=made.stages) if made.stages else None,
        loss=made.loss or own_loss,
        make_batch=lambda seed: {
            key: value.to(device) for key, value in made.make_batch(seeded_generator(seed)).items()
        },
    )


_gpt2_base = partial(text.gpt2, layers=12, width=768, heads=12, words=50257)
_gpt2_small = partial(text.gpt2, width=256, heads=4, words=8192)
_bert_base = partial(text.bert, layers=12, width=768, heads=12, words=30522, shape=(4, 256))
_bert_small = partial(text.bert, width=384, heads=6, shape=(2, 256))
_llama = partial(text.rotary, kind="Llama", width=384, heads=6, shared_heads=6, inner=1024)
_llama_large = partial(
    text.rotary, kind="Llama", layers=16, width=2048, heads=32, shared_heads=8, inner=5632,
    words=32000,
)  # fmt: skip

REGISTRY: dict[str, Maker] = {
    "gpt2": partial(_gpt2_base, shape=(2, 256)),
    "gpt2-1row": partial(_gpt2_base, shape=(1, 256)),
    "gpt2-deep": partial(_gpt2_small, layers=24, shape=(2, 192)),
    "gpt2-2layer": partial(_gpt2_small, layers=2, words=512, shape=(2, 192)),
    **{
        f"gpt2-{layers}": partial(_gpt2_small, layers=layers, shape=(2, 96))
        for layers in (12, 48, 96)
    },
    "bert-base": partial(_bert_base, head="SequenceClassification"),
    "bert-mlm": partial(_bert_base, head="MaskedLM"),
    "bert-narrow": partial(_bert_small, head="SequenceClassification", layers=12, words=8192),
    "bert-2layer": partial(_bert_small, head="MaskedLM", layers=2, words=512),
    "modernbert": text.modernbert,
    "llama": partial(_llama, layers=8),
    "llama-2layer": partial(_llama, layers=2, words=512),
    # Llama 3's vocabulary on a model small enough for a CPU. Its loss block takes most of the
    # time and memory.
    "llama-vocabulary": partial(
        text.rotary, kind="Llama", layers=4, width=512, heads=8, shared_heads=8, inner=1408,
        words=128256, shape=(1, 1024),
    ),
    "llama-lora": partial(_llama, layers=8, rank=8),
    "llama-qlora": partial(
        text.rotary, kind="Llama", layers=6, width=256, heads=8, shared_heads=4, inner=768,
        words=4096, shape=(4, 256), rank=16, is_quantized=True,
    ),
    # It differs from the Llama type by grouped queries.
    "qwen3": partial(
        text.rotary, kind="Qwen3", layers=8, width=320, heads=8, shared_heads=4, inner=896
    ),
    "qwen3-moe": partial(
        text.rotary, kind="Qwen3Moe", layers=6, width=256, heads=8, shared_heads=4, inner=384,
        experts=8,
    ),
    "t5-small": partial(
        text.t5, layers=6, width=512, heads=8, inner=2048, source=(2, 256), target=(2, 128)
    ),
    "vit-base": partial(images.vit, width=768, heads=12),
    "vit-small": partial(images.vit, width=384, heads=6),
    "resnet50": partial(images.resnet, depths=(3, 4, 6, 3), batch=5, pixels=160),
    "resnet101": partial(images.resnet, depths=(3, 4, 23, 3), batch=3, pixels=128),
    "unet": partial(images.unet, base_width=32, batch=2, pixels=128),
    "hf-resnet": partial(
        images.staged, kind="ResNet", widths=[128, 256, 512, 1024], depths=[2, 2, 3, 2],
        embedding_size=64, layer_type="bottleneck", small={"depths": [2, 2], "embedding_size": 8},
    ),
    # RegNetY-800MF: grouped convolutions, each residual layer with squeeze and excitation.
    "regnet": partial(
        images.staged, kind="RegNet", widths=[64, 128, 320, 768], depths=[1, 3, 8, 2],
        embedding_size=32, groups_width=16, layer_type="y",
        small={"depths": [1, 2], "embedding_size": 8, "groups_width": 8},
    ),
    # ConvNeXt-T
    "convnext": partial(
        images.staged, kind="ConvNext", widths=[96, 192, 384, 768], depths=[3, 3, 9, 3], batch=4,
        pixels=160, image_size=160, num_stages=4,
        small={"depths": [1, 2], "image_size": 32, "num_stages": 2},
    ),
    "mlp": plain.mlp,
    "encoder": partial(plain.encoder, layers=8, width=512, heads=8, shape=(4, 192)),
    "encoder-deep": partial(plain.encoder, layers=32, width=128, heads=4, shape=(2, 192)),
    "encoder-wide": partial(plain.encoder, layers=2, width=1024, heads=16, shape=(2, 192)),
    "gpt2-gpu": partial(
        text.gpt2, layers=24, width=1024, heads=16, words=50257, shape=(8, 1024)
    ),
    "bert-gpu": partial(
        text.bert, head="SequenceClassification", layers=24, width=1024, heads=16, words=30522,
        shape=(24, 512),
    ),
    "llama-gpu": partial(_llama_large, shape=(4, 2048)),
    "llama-lora-gpu": partial(_llama_large, rank=16, shape=(6, 2048)),
    "t5-gpu": partial(
        text.t5, layers=24, width=1024, heads=16, inner=4096, source=(8, 512), target=(8, 128)
    ),
    "resnet50-gpu": partial(images.resnet, depths=(3, 4, 6, 3), batch=320, pixels=224),
    "resnet101-gpu": partial(images.resnet, depths=(3, 4, 23, 3), batch=224, pixels=224),
    "unet-gpu": partial(images.unet, base_width=64, batch=16, pixels=512),
    "encoder-deep-gpu": partial(plain.encoder, layers=96, width=512, heads=8, shape=(16, 512)),
    "encoder-wide-gpu": partial(plain.encoder, layers=4, width=4096, heads=32, shape=(24, 1024)),
    "t5-12": t5_narrow,
    "bart": bart,
    "whisper": whisper,
    "transformer": transformer,
    "clip": clip,
    "llava": llava,
    "conditional-unet": conditional_unet,
    "two-streams": two_streams,
    "densenet": densenet,
    "hrnet": hrnet,
    "segformer": segformer,
}  # fmt: skip
"""Name to maker."""

BRANCHED = (
    "t5-small", "t5-12", "bart", "whisper", "transformer", "clip", "unet", "conditional-unet",
    "two-streams", "densenet", "hrnet", "segformer", "llava",
)  # fmt: skip
"""Models whose step is not a chain of blocks."""

COMPARED = {
    "cpu": (
        "gpt2-deep", "gpt2-1row", "bert-narrow", "llama", "t5-small", "llama-lora", "encoder-deep",
        "encoder-wide", "vit-small", "resnet50", "resnet101", "regnet", "unet",
    ),
    "cuda": (
        "gpt2-gpu", "bert-gpu", "llama-gpu", "t5-gpu", "llama-lora-gpu", "encoder-deep-gpu",
        "encoder-wide-gpu", "resnet50-gpu", "resnet101-gpu", "unet-gpu",
    ),
}  # fmt: skip
"""Kind of device to the models on which all methods are compared."""
