"""Models that are no chain: encoder-decoders, towers, streams side by side, branches of several sizes, skips, dense connections.

Each is built from written-out configuration values and computes its loss itself. `NATURAL_MODULES` says around which modules one would
put checkpoints by hand: its blocks, and where it has them its stages. Needs transformers, and diffusers for two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional


class Step(NamedTuple):
    """What a model returns that is no library's: the loss, and what it was computed from."""

    loss: Tensor
    prediction: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchedModel:
    """A model with what a step of it needs.

    Attributes:
        model: the module; its output has a `loss`.
        make_batch: keyword arguments of one call, drawn from a generator, on the CPU.
        blocks: paths of its blocks, a `*` for any one name.
        stages: likewise of its stages, each of several blocks; empty where there are none.
    """

    model: nn.Module
    make_batch: Callable[[torch.Generator], dict[str, Tensor]]
    blocks: tuple[str, ...]
    stages: tuple[str, ...] = ()


def modules_at(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """The submodules whose paths match one of the patterns, in the model's order.

    Raises:
        ValueError: a pattern matches none.
    """
    found = [
        [module for path, module in model.named_modules() if _matches(path, pattern)]
        for pattern in patterns
    ]
    for pattern, modules in zip(patterns, found, strict=True):
        if not modules:
            raise ValueError(
                f"no submodule of {type(model).__name__} has a path like {pattern!r}; the library may have moved it"
            )
    wanted = {module for modules in found for module in modules}
    return [module for module in model.modules() if module in wanted]


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return bool(path) and len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def _tokens(generator: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(3, vocabulary, shape, generator=generator)


# --- encoder and decoder ------------------------------------------------------------------------------


def _t5(tiny: bool) -> BranchedModel:
    """T5 of 12 + 12 layers, narrow."""
    layers, width, vocabulary, source, target = (
        (2, 32, 97, (2, 16), (2, 8)) if tiny else (12, 256, 8192, (2, 160), (2, 80))
    )
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // 8,
        num_heads=8,
        d_ff=4 * width,
        num_layers=layers,
        num_decoder_layers=layers,
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
        use_cache=False,
    )
    return BranchedModel(
        model=transformers.T5ForConditionalGeneration(config),
        make_batch=partial(_translation, vocabulary=vocabulary, source=source, target=target),
        blocks=("encoder.block.*", "decoder.block.*"),
    )


def _bart(tiny: bool) -> BranchedModel:
    """BART-base, half as wide."""
    layers, width, vocabulary, source, target = (
        (2, 36, 97, (2, 16), (2, 8)) if tiny else (6, 384, 8192, (2, 256), (2, 128))
    )
    config = transformers.BartConfig(
        vocab_size=vocabulary,
        max_position_embeddings=source[1],
        **_encoder_decoder(layers, width),
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,  # pyright: ignore[reportCallIssue]
        use_cache=False,
    )
    return BranchedModel(
        model=transformers.BartForConditionalGeneration(config),
        make_batch=partial(_translation, vocabulary=vocabulary, source=source, target=target),
        blocks=("model.encoder.layers.*", "model.decoder.layers.*"),
    )


def _whisper(tiny: bool) -> BranchedModel:
    """Whisper-tiny on 8 seconds of sound."""
    layers, width, vocabulary, positions, target = (
        (2, 36, 97, 16, (2, 8)) if tiny else (4, 384, 8192, 400, (2, 64))
    )
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        max_source_positions=positions,
        max_target_positions=target[1],
        **_encoder_decoder(layers, width),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        sound = torch.randn(target[0], config.num_mel_bins, 2 * positions, generator=generator)
        return {"input_features": sound, "labels": _tokens(generator, vocabulary, *target)}

    return BranchedModel(
        model=transformers.WhisperForConditionalGeneration(config),
        make_batch=make_batch,
        blocks=("model.encoder.layers.*", "model.decoder.layers.*"),
    )


def _encoder_decoder(layers: int, width: int) -> dict[str, Any]:
    return {
        "d_model": width,
        **{f"{side}_layers": layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 6 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4 * width for side in ("encoder", "decoder")},
    }


def _translation(
    generator: torch.Generator, *, vocabulary: int, source: tuple[int, int], target: tuple[int, int]
) -> dict[str, Tensor]:
    return {
        "input_ids": _tokens(generator, vocabulary, *source),
        "labels": _tokens(generator, vocabulary, *target),
    }


class _Transformer(nn.Module):
    """`nn.Transformer` that learns to return its target."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.model = nn.Transformer(width, 8, layers, layers, 4 * width, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, src: Tensor, tgt: Tensor) -> Step:
        prediction = self.head(self.model(src, tgt))
        return Step(functional.mse_loss(prediction, tgt), prediction)


def _transformer(tiny: bool) -> BranchedModel:
    layers, width, source, target = (
        (2, 32, (2, 12), (2, 8)) if tiny else (6, 256, (4, 128), (4, 96))
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "src": torch.randn(*source, width, generator=generator),
            "tgt": torch.randn(*target, width, generator=generator),
        }

    return BranchedModel(
        model=_Transformer(layers, width),
        make_batch=make_batch,
        blocks=("model.encoder.layers.*", "model.decoder.layers.*"),
    )


# --- several towers -----------------------------------------------------------------------------------


class _Contrastive(nn.Module):
    """CLIP with its loss."""

    def __init__(self, config: transformers.CLIPConfig) -> None:
        super().__init__()
        self.model = transformers.CLIPModel(config)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def _clip(tiny: bool) -> BranchedModel:
    """CLIP: text of width 256, images of width 384."""
    layers, text, image, pixels, length, batch = (
        (2, 32, 36, 32, 8, 2) if tiny else (6, 256, 384, 112, 48, 8)
    )
    vocabulary, special = 4096, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    towers: dict[str, Any] = {
        "text_config": {
            "vocab_size": vocabulary, "hidden_size": text, "intermediate_size": 4 * text, "num_hidden_layers": layers,
            "num_attention_heads": 4, "max_position_embeddings": length, **special,
        },
        "vision_config": {
            "hidden_size": image, "intermediate_size": 4 * image, "num_hidden_layers": layers, "num_attention_heads": 6,
            "image_size": pixels, "patch_size": 16,
        },
    }  # fmt: skip
    config = transformers.CLIPConfig(**towers, projection_dim=text)

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        images = torch.randn(batch, 3, pixels, pixels, generator=generator)
        return {"input_ids": _tokens(generator, vocabulary, batch, length), "pixel_values": images}

    return BranchedModel(
        model=_Contrastive(config),
        make_batch=make_batch,
        blocks=("model.text_model.encoder.layers.*", "model.vision_model.encoder.layers.*"),
    )


def _llava(tiny: bool) -> BranchedModel:
    """A vision tower whose patches take the places of tokens in a Llama type."""
    layers, width, pixels, length, batch = (2, 32, 28, 16, 2) if tiny else (6, 256, 112, 160, 2)
    vocabulary, patch = 4096, 14
    num_patches, image_token = (pixels // patch) ** 2, vocabulary - 1
    vision = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        image_size=pixels,
        patch_size=patch,
    )
    text = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        image_seq_length=num_patches,
        vision_feature_layer=-1,
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = _tokens(generator, image_token, batch, length)
        tokens[:, 2 : 2 + num_patches] = image_token
        images = torch.randn(batch, 3, pixels, pixels, generator=generator)
        return {"input_ids": tokens, "pixel_values": images, "labels": tokens.clone()}

    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower.post_layernorm.requires_grad_(
        False
    )  # of the class token, which nothing reads here
    return BranchedModel(
        model=model,
        make_batch=make_batch,
        blocks=("model.vision_tower.encoder.layers.*", "model.language_model.layers.*"),
    )


# --- diffusion ----------------------------------------------------------------------------------------


class _Denoiser(nn.Module):
    """A diffusion model that predicts the noise; `conditions` are the names of its further arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Tensor, noise: Tensor, **conditions: Tensor) -> Step:
        (prediction,) = self.model(sample, return_dict=False, **conditions)
        return Step(functional.mse_loss(prediction, noise), prediction)


def _diffusers(name: str) -> Any:
    try:
        import diffusers
    except ImportError as error:
        msg = f"{name} is a model of the package diffusers: pip install diffusers"
        raise RuntimeError(msg) from error
    return getattr(diffusers, name)


def _conditional_unet(tiny: bool) -> BranchedModel:
    """The U-Net of latent diffusion, with attention to a text on two of its three levels."""
    widths, depth, size, text, length = (
        ((16, 32), 1, 8, 16, 4) if tiny else ((48, 96, 192), 2, 32, 128, 32)
    )
    model = _diffusers("UNet2DConditionModel")(
        sample_size=size,
        block_out_channels=widths,
        layers_per_block=depth,
        down_block_types=(*["CrossAttnDownBlock2D"] * (len(widths) - 1), "DownBlock2D"),
        up_block_types=("UpBlock2D", *["CrossAttnUpBlock2D"] * (len(widths) - 1)),
        cross_attention_dim=text,
        attention_head_dim=8,
        norm_num_groups=8 if tiny else 16,
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "sample": torch.randn(2, 4, size, size, generator=generator),
            "noise": torch.randn(2, 4, size, size, generator=generator),
            "timestep": torch.randint(0, 1000, (2,), generator=generator),
            "encoder_hidden_states": torch.randn(2, length, text, generator=generator),
        }

    return BranchedModel(
        model=_Denoiser(model),
        make_batch=make_batch,
        blocks=(
            *(
                f"model.{side}_blocks.*.{kind}.*"
                for side in ("down", "up")
                for kind in ("resnets", "attentions")
            ),
            "model.mid_block.resnets.*",
            "model.mid_block.attentions.*",
        ),
        stages=("model.down_blocks.*", "model.mid_block", "model.up_blocks.*"),
    )


def _two_streams(tiny: bool) -> BranchedModel:
    """The diffusion transformer of Stable Diffusion 3: image and text in two streams that attend to each other."""
    layers, heads, head_width, size, text, length = (
        (2, 2, 16, 8, 16, 4) if tiny else (8, 8, 32, 32, 128, 48)
    )
    model = _diffusers("SD3Transformer2DModel")(
        sample_size=size,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=head_width,
        num_attention_heads=heads,
        joint_attention_dim=text,
        caption_projection_dim=heads * head_width,
        pooled_projection_dim=text // 2,
        pos_embed_max_size=size,
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "sample": torch.randn(2, 4, size, size, generator=generator),
            "noise": torch.randn(2, 4, size, size, generator=generator),
            "timestep": 1000 * torch.rand(2, generator=generator),
            "encoder_hidden_states": torch.randn(2, length, text, generator=generator),
            "pooled_projections": torch.randn(2, text // 2, generator=generator),
        }

    return BranchedModel(
        model=_TwoStreams(model), make_batch=make_batch, blocks=("model.transformer_blocks.*",)
    )


class _TwoStreams(_Denoiser):
    """A denoiser whose library calls the sample `hidden_states`."""

    def forward(self, sample: Tensor, noise: Tensor, **conditions: Tensor) -> Step:
        (prediction,) = self.model(hidden_states=sample, return_dict=False, **conditions)
        return Step(functional.mse_loss(prediction, noise), prediction)


# --- images -------------------------------------------------------------------------------------------


def _classification(
    generator: torch.Generator, *, batch: int, pixels: int, classes: int
) -> dict[str, Tensor]:
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    return {"images": images, "labels": torch.randint(0, classes, (batch,), generator=generator)}


class _DenseLayer(nn.Module):
    """Batch normalization, ReLU and convolution, 1x1 then 3x3, of all that the layers before it in its block made."""

    def __init__(self, in_width: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_width)
        self.conv1 = nn.Conv2d(in_width, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, *features: Tensor) -> Tensor:
        inner = self.conv1(functional.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(functional.relu(self.norm2(inner)))


class _DenseBlock(nn.Module):
    def __init__(self, in_width: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _DenseLayer(in_width + index * growth, growth) for index in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


class _DenseNet(nn.Module):
    """DenseNet (Huang et al., 2017): each layer reads what all layers before it in its block made; between blocks the size halves."""

    def __init__(self, depths: tuple[int, ...], growth: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages: list[nn.Module] = []
        for index, depth in enumerate(depths):
            stages.append(_DenseBlock(width, growth, depth))
            width += depth * growth
            if index < len(depths) - 1:
                between = (
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, width // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                )
                stages.append(nn.Sequential(*between))
                width //= 2
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Step:
        scores = self.head(functional.relu(self.norm(self.stages(self.stem(images)))).mean((2, 3)))
        return Step(functional.cross_entropy(scores, labels), scores)


def _densenet(tiny: bool) -> BranchedModel:
    """DenseNet-121."""
    depths, growth, width, pixels, batch = (
        ((2, 3), 4, 8, 32, 2) if tiny else ((6, 12, 24, 16), 32, 64, 128, 4)
    )
    return BranchedModel(
        model=_DenseNet(depths, growth, width, classes=100),
        make_batch=partial(_classification, batch=batch, pixels=pixels, classes=100),
        blocks=("stages.*.layers.*",),
        stages=("stages.*",),
    )


class _Residual(nn.Module):
    """Two 3x3 convolutions with batch normalization around a shortcut (He et al., 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(
            x + self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        )


class _Exchange(nn.Module):
    """Branches of several sizes, each of some residual blocks, and then every branch added to every other at its size."""

    def __init__(self, widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*[_Residual(width) for _ in range(depth)]) for width in widths
        )
        self.paths = nn.ModuleList(
            nn.ModuleList(_path(widths, source, target) for source in range(len(widths)))
            for target in range(len(widths))
        )

    def forward(self, *images: Tensor) -> tuple[Tensor, ...]:
        made = [branch(x) for branch, x in zip(self.branches, images, strict=True)]
        fused = []
        for paths in self.paths:
            terms: Iterator[Tensor] = (path(x) for path, x in zip(paths, made, strict=True))  # pyright: ignore[reportArgumentType]
            total = next(terms)
            for term in terms:
                total = total + term
            fused.append(functional.relu(total))
        return tuple(fused)


def _path(widths: tuple[int, ...], source: int, target: int) -> nn.Module:
    """From one branch's size to another's."""
    if source == target:
        return nn.Identity()
    if source > target:
        return nn.Sequential(
            nn.Conv2d(widths[source], widths[target], 1, bias=False),
            nn.BatchNorm2d(widths[target]),
            nn.Upsample(scale_factor=2 ** (source - target), mode="nearest"),
        )
    steps: list[nn.Module] = []
    for step in range(source + 1, target + 1):
        out_width = widths[target] if step == target else widths[source]
        steps += [
            nn.Conv2d(widths[source], out_width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(out_width),
        ]
    return nn.Sequential(*steps)


class _HRNet(nn.Module):
    """High-resolution network (Wang et al., 2019) of three branches throughout, with a classifier of all of them."""

    def __init__(
        self, widths: tuple[int, ...], num_exchanges: int, depth: int, classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        )
        self.begin = nn.ModuleList(
            nn.Conv2d(32, width, 3, 2**index, 1) for index, width in enumerate(widths)
        )
        self.exchanges = nn.ModuleList(_Exchange(widths, depth) for _ in range(num_exchanges))
        self.head = nn.Linear(sum(widths), classes)

    def forward(self, images: Tensor, labels: Tensor) -> Step:
        stem = self.stem(images)
        made: tuple[Tensor, ...] = tuple(begin(stem) for begin in self.begin)
        for exchange in self.exchanges:
            made = exchange(*made)
        scores = self.head(torch.cat([x.mean((2, 3)) for x in made], 1))
        return Step(functional.cross_entropy(scores, labels), scores)


def _hrnet(tiny: bool) -> BranchedModel:
    widths, num_exchanges, depth, pixels, batch = (
        ((4, 8), 2, 1, 32, 2) if tiny else ((24, 48, 96), 4, 2, 128, 4)
    )
    return BranchedModel(
        model=_HRNet(widths, num_exchanges, depth, classes=100),
        make_batch=partial(_classification, batch=batch, pixels=pixels, classes=100),
        blocks=("exchanges.*.branches.*.*",),
        stages=("exchanges.*",),
    )


def _segformer(tiny: bool) -> BranchedModel:
    """SegFormer-B0 with its decoder over all four levels."""
    depths, widths, pixels, decoder = (
        ([1, 1, 1, 1], [8, 16, 40, 64], 32, 16)
        if tiny
        else ([2, 2, 2, 2], [32, 64, 160, 256], 192, 256)
    )
    classes, batch = 16, 2
    config = transformers.SegformerConfig(
        num_labels=classes,  # pyright: ignore[reportCallIssue]
        depths=depths,
        hidden_sizes=widths,
        decoder_hidden_size=decoder,
    )

    def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
        images = torch.randn(batch, 3, pixels, pixels, generator=generator)
        return {
            "pixel_values": images,
            "labels": torch.randint(0, classes, (batch, pixels, pixels), generator=generator),
        }

    return BranchedModel(
        model=transformers.SegformerForSemanticSegmentation(config),
        make_batch=make_batch,
        blocks=("segformer.stages.*.blocks.*",),
    )


BUILDERS: Mapping[str, Callable[[bool], BranchedModel]] = {
    "t5-12": _t5,
    "bart": _bart,
    "whisper": _whisper,
    "transformer": _transformer,
    "clip": _clip,
    "llava": _llava,
    "conditional-unet": _conditional_unet,
    "two-streams": _two_streams,
    "densenet": _densenet,
    "hrnet": _hrnet,
    "segformer": _segformer,
}
"""Name to builder; a builder takes whether the variant for tests is wanted."""
