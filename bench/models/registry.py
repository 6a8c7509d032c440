"""The workloads by name, and which of them the pages show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from bench.models import images, plain, text
from bench.models.batches import seeded_generator
from bench.models.branched import BranchedModel, modules_at
from bench.models.branched_images import densenet, hrnet, segformer
from bench.models.diffusion import conditional_unet, two_streams
from bench.models.encoder_decoders import bart, t5_narrow, transformer, whisper
from bench.models.towers import clip, llava
from bench.models.workload import Workload, own_loss, prepared


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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return REGISTRY[name](name, tiny, torch.device(device))


def _branched(
    name: str, tiny: bool, device: torch.device, *, build: Callable[[bool], BranchedModel]
) -> Workload:
    found = build(tiny)
    make_batch = found.make_batch
    return Workload(
        name=name,
        model=prepared(found.model, device),
        layers=partial(modules_at, patterns=found.blocks),
        loss=own_loss,
        make_batch=lambda seed: {
            key: value.to(device) for key, value in make_batch(seeded_generator(seed)).items()
        },
        stages=partial(modules_at, patterns=found.stages) if found.stages else None,
    )


_small_gpt2 = partial(text.gpt2, width=256, heads=4, vocabulary=8192)
_small_bert = partial(text.bert, width=384, heads=6, shape=(2, 256))
_llama = partial(text.rotary, kind="Llama", width=384, heads=6, key_value_heads=6, inner=1024)
_large_llama = partial(
    text.rotary,
    kind="Llama",
    num_layers=16,
    width=2048,
    heads=32,
    key_value_heads=8,
    inner=5632,
    vocabulary=32000,
)


_BRANCHED_BUILDERS: dict[str, Callable[[bool], BranchedModel]] = {
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
}

REGISTRY: dict[str, Callable[[str, bool, torch.device], Workload]] = {
    "gpt2": partial(
        text.gpt2, num_layers=12, width=768, heads=12, vocabulary=50257, shape=(2, 256)
    ),
    # One sequence in place of two.
    "gpt2-1row": partial(
        text.gpt2, num_layers=12, width=768, heads=12, vocabulary=50257, shape=(1, 256)
    ),
    "gpt2-deep": partial(_small_gpt2, num_layers=24, shape=(2, 192)),
    "gpt2-2layer": partial(_small_gpt2, num_layers=2, vocabulary=512, shape=(2, 192)),
    "gpt2-12": partial(_small_gpt2, num_layers=12, shape=(2, 96)),
    "gpt2-48": partial(_small_gpt2, num_layers=48, shape=(2, 96)),
    "gpt2-96": partial(_small_gpt2, num_layers=96, shape=(2, 96)),
    "bert-base": partial(
        text.bert,
        head="classification",
        num_layers=12,
        width=768,
        heads=12,
        vocabulary=30522,
        shape=(4, 256),
    ),
    "bert-mlm": partial(
        text.bert,
        head="masked",
        num_layers=12,
        width=768,
        heads=12,
        vocabulary=30522,
        shape=(4, 256),
    ),
    "bert-narrow": partial(_small_bert, head="classification", num_layers=12, vocabulary=8192),
    "bert-2layer": partial(_small_bert, head="masked", num_layers=2, vocabulary=512),
    "modernbert": text.modernbert,
    "llama": partial(_llama, num_layers=8),
    "llama-2layer": partial(_llama, num_layers=2, vocabulary=512),
    # Llama 3's vocabulary on a model small enough for a CPU. Its loss block takes most of the
    # time and memory.
    "llama-vocabulary": partial(
        text.rotary,
        kind="Llama",
        num_layers=4,
        width=512,
        heads=8,
        key_value_heads=8,
        inner=1408,
        vocabulary=128256,
        shape=(1, 1024),
    ),
    "llama-lora": partial(_llama, num_layers=8, adapter_rank=8),
    # It differs from the Llama type by grouped queries.
    "qwen3": partial(
        text.rotary, kind="Qwen3", num_layers=8, width=320, heads=8, key_value_heads=4, inner=896
    ),
    "qwen3-moe": partial(
        text.rotary,
        kind="Qwen3Moe",
        num_layers=6,
        width=256,
        heads=8,
        key_value_heads=4,
        inner=384,
        experts=8,
    ),
    "t5-small": partial(
        text.t5, num_layers=6, width=512, heads=8, inner=2048, shape=(2, 256), labels_shape=(2, 128)
    ),
    "vit-base": partial(images.vit, width=768, heads=12),
    "vit-small": partial(images.vit, width=384, heads=6),
    "resnet50": partial(images.resnet, depths=(3, 4, 6, 3), batch=5, pixels=160),
    "resnet101": partial(images.resnet, depths=(3, 4, 23, 3), batch=3, pixels=128),
    "unet": partial(images.unet, base_width=32, batch=2, pixels=128),
    "hf-resnet": partial(
        images.staged,
        kind="ResNet",
        widths=[128, 256, 512, 1024],
        depths=[2, 2, 3, 2],
        embedding_size=64,
        layer_type="bottleneck",
        small={"depths": [2, 2], "embedding_size": 8},
    ),
    # RegNetY-800MF: grouped convolutions, each residual layer with squeeze and excitation.
    "regnet": partial(
        images.staged,
        kind="RegNet",
        widths=[64, 128, 320, 768],
        depths=[1, 3, 8, 2],
        embedding_size=32,
        groups_width=16,
        layer_type="y",
        small={"depths": [1, 2], "embedding_size": 8, "groups_width": 8},
    ),
    # ConvNeXt-T
    "convnext": partial(
        images.staged,
        kind="ConvNext",
        widths=[96, 192, 384, 768],
        depths=[3, 3, 9, 3],
        batch=4,
        pixels=160,
        image_size=160,
        num_stages=4,
        small={"depths": [1, 2], "image_size": 32, "num_stages": 2},
    ),
    "mlp": plain.mlp,
    "encoder": partial(plain.encoder, num_layers=8, width=512, heads=8, shape=(4, 192)),
    "encoder-deep": partial(plain.encoder, num_layers=32, width=128, heads=4, shape=(2, 192)),
    "encoder-wide": partial(plain.encoder, num_layers=2, width=1024, heads=16, shape=(2, 192)),
    "gpt2-gpu": partial(
        text.gpt2, num_layers=24, width=1024, heads=16, vocabulary=50257, shape=(8, 1024)
    ),
    "bert-gpu": partial(
        text.bert,
        head="classification",
        num_layers=24,
        width=1024,
        heads=16,
        vocabulary=30522,
        shape=(24, 512),
    ),
    "llama-gpu": partial(_large_llama, shape=(4, 2048)),
    "llama-lora-gpu": partial(_large_llama, adapter_rank=16, shape=(6, 2048)),
    "t5-gpu": partial(
        text.t5,
        num_layers=24,
        width=1024,
        heads=16,
        inner=4096,
        shape=(8, 512),
        labels_shape=(8, 128),
    ),
    "resnet50-gpu": partial(images.resnet, depths=(3, 4, 6, 3), batch=320, pixels=224),
    "resnet101-gpu": partial(images.resnet, depths=(3, 4, 23, 3), batch=224, pixels=224),
    "unet-gpu": partial(images.unet, base_width=64, batch=16, pixels=512),
    "encoder-deep-gpu": partial(plain.encoder, num_layers=96, width=512, heads=8, shape=(16, 512)),
    "encoder-wide-gpu": partial(
        plain.encoder, num_layers=4, width=4096, heads=32, shape=(24, 1024)
    ),
    **{name: partial(_branched, build=build) for name, build in _BRANCHED_BUILDERS.items()},
}
"""Name to builder; a builder takes (name, tiny, device)."""

BRANCHED = (
    "t5-small",
    "t5-12",
    "bart",
    "whisper",
    "transformer",
    "clip",
    "unet",
    "conditional-unet",
    "two-streams",
    "densenet",
    "hrnet",
    "segformer",
    "llava",
)
"""Models whose step is not a chain of blocks."""

COMPARED = {
    "cpu": (
        "gpt2-deep",
        "gpt2-1row",
        "bert-narrow",
        "llama",
        "t5-small",
        "llama-lora",
        "encoder-deep",
        "encoder-wide",
        "vit-small",
        "resnet50",
        "resnet101",
        "regnet",
        "unet",
    ),
    "cuda": (
        "gpt2-gpu",
        "bert-gpu",
        "llama-gpu",
        "t5-gpu",
        "llama-lora-gpu",
        "encoder-deep-gpu",
        "encoder-wide-gpu",
        "resnet50-gpu",
        "resnet101-gpu",
        "unet-gpu",
    ),
}
"""Kind of device to the models on which all methods are compared."""
