"""The models of `bench.cuda`: published sizes in bfloat16, with a batch of any number of rows.

The tiny variants have the same classes and are meant for tests on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import batches
from bench.models.hf import TOKENS, halves, hf, usual, with_adapters

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """One model of the campaign.

    Attributes:
        build: gives the model on the current default device and in the default dtype.
        make_batch: gives the maker of batches of so many rows.
        num_rows: rows of the batch whose memory and time are measured.
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[int], batches.MakeBatch]
    num_rows: int

    def model(self, device: torch.device) -> nn.Module:
        """The model in training mode, with weights drawn from seed 0."""
        dtype = torch.get_default_dtype()
        torch.manual_seed(0)
        try:
            torch.set_default_dtype(torch.bfloat16)
            with device:
                return self.build().train()
        finally:
            torch.set_default_dtype(dtype)

    def batch(self, device: torch.device, *, num_rows: int | None = None, seed: int = 0) -> Batch:
        """A batch on a device, floating point values in bfloat16."""
        draw = torch.Generator().manual_seed(seed)
        made = self.make_batch(num_rows or self.num_rows)(draw)
        return {
            name: value.to(device, torch.bfloat16 if value.is_floating_point() else value.dtype)
            for name, value in made.items()
        }


def gpu_models(*, tiny: bool = False) -> dict[str, GpuModel]:
    """Name -> model."""
    length, pixels = (16, 32) if tiny else (1024, 224)
    llama = partial(_decoder, tiny, "Llama")
    models = {
        "gpt2-medium": _causal(partial(_gpt2, tiny), length, 8, 97 if tiny else 50257),
        "llama-1b": _causal(
            partial(llama, 16, 2048, 32, 8192), 4 * length, 2, 97 if tiny else 128256
        ),
        "llama-8b-lora": _causal(
            lambda: with_adapters(llama(32, 4096, 32, 14336), 16, is_zero=True),
            2 * length, 2, 97 if tiny else 128256,
        ),
        "qwen3-4b": _causal(
            partial(
                _decoder, tiny, "Qwen3", 36, 2560, 32, 9728, 151936, head_dim=8 if tiny else 128
            ),
            2 * length, 2, 97 if tiny else 151936,
        ),
        "bert-large": GpuModel(
            build=partial(_encoder, tiny, "BertForSequenceClassification", 97 if tiny else 30522),
            make_batch=lambda rows: batches.drawn(
                input_ids=batches.words((rows, length // 2), 97 if tiny else 30522),
                labels=batches.classes(2, rows),
            ),
            num_rows=32,
        ),
        "vit-large": _classified(
            partial(
                _encoder, tiny, "ViTForImageClassification", image_size=pixels, patch_size=16,
                num_labels=10,
            ),
            pixels, 128,
        ),
        "resnet-50": _classified(partial(_resnet, tiny), pixels, 256),
        "whisper-medium": _whisper(tiny),
        "sdxl-unet": _denoised(tiny),
    }  # fmt: skip
    return {name: replace(each, num_rows=2) if tiny else each for name, each in models.items()}


def _causal(
    build: Callable[[], nn.Module], length: int, num_rows: int, vocabulary: int
) -> GpuModel:
    make = lambda rows: batches.causal((rows, length), vocabulary)  # noqa: E731
    return GpuModel(build=build, make_batch=make, num_rows=num_rows)


def _classified(build: Callable[[], nn.Module], pixels: int, num_rows: int) -> GpuModel:
    make = lambda rows: batches.images(rows, pixels, 10)  # noqa: E731
    return GpuModel(build=build, make_batch=make, num_rows=num_rows)


def _gpt2(tiny: bool) -> nn.Module:
    layers, width, heads, words = (2, 32, 2, 97) if tiny else (24, 1024, 16, 50257)
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return hf(
        "GPT2LMHeadModel", n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, **special
    )


def _decoder(
    tiny: bool,
    kind: str,
    layers: int,
    width: int,
    heads: int,
    inner: int,
    words: int = 128256,
    **fields: Any,
) -> nn.Module:
    sizes = (2, 32, 4, 48, 97) if tiny else (layers, width, heads, inner, words)
    return hf(
        f"{kind}ForCausalLM", **usual(*sizes), num_key_value_heads=2 if tiny else 8,
        max_position_embeddings=8192, **TOKENS, **fields,
    )  # fmt: skip


def _encoder(tiny: bool, kind: str, words: int = 0, **fields: Any) -> nn.Module:
    sizes = (2, 32, 2, 128) if tiny else (24, 1024, 16, 4096)
    return hf(kind, **usual(*sizes, words), **fields)


def _resnet(tiny: bool) -> nn.Module:
    small = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
    return hf("ResNetForImageClassification", **(small if tiny else {}), num_labels=10)


def _whisper(tiny: bool) -> GpuModel:
    layers, width, heads, words, positions, length = (
        (2, 36, 6, 97, 16, 8) if tiny else (24, 1024, 16, 51865, 1500, 128)
    )
    build = partial(
        hf, "WhisperForConditionalGeneration", **halves(layers, width, heads, layerdrop=0.0),
        vocab_size=words, max_source_positions=positions, decoder_start_token_id=1, **TOKENS,
        max_target_positions=8 if tiny else 448,
    )  # fmt: skip
    make = lambda rows: batches.drawn(  # noqa: E731
        input_features=batches.normal(rows, 80, 2 * positions),
        labels=batches.words((rows, length), words),
    )
    return GpuModel(build=build, make_batch=make, num_rows=8)


def _denoised(tiny: bool) -> GpuModel:
    size, length, text, pooled = (8, 4, 16, 16) if tiny else (128, 77, 2048, 1280)
    make = lambda rows: batches.drawn(  # noqa: E731
        sample=batches.normal(rows, 4, size, size),
        noise=batches.normal(rows, 4, size, size),
        timestep=batches.classes(1000, rows),
        encoder_hidden_states=batches.normal(rows, length, text),
        text_embeds=batches.normal(rows, pooled),
        time_ids=lambda _: torch.ones(rows, 6),
    )
    return GpuModel(build=partial(_sdxl, tiny), make_batch=make, num_rows=4)


class _Denoiser(nn.Module):
    """A U-Net with its loss: the mean squared error of the predicted noise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        sample: Tensor,
        noise: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        text_embeds: Tensor,
        time_ids: Tensor,
    ) -> dict[str, Tensor]:
        """The loss of one batch."""
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        predicted = self.model(sample, timestep, encoder_hidden_states, added_cond_kwargs=added)
        return {"loss": nn.functional.mse_loss(predicted.sample.float(), noise.float())}


def _sdxl(tiny: bool) -> nn.Module:
    import diffusers

    sizes: dict[str, Any] = {
        "sample_size": 8 if tiny else 128,
        "block_out_channels": (16, 32, 32) if tiny else (320, 640, 1280),
        "transformer_layers_per_block": (1, 1, 1) if tiny else (1, 2, 10),
        "attention_head_dim": (2, 4, 4) if tiny else (5, 10, 20),
        "cross_attention_dim": 16 if tiny else 2048,
        "addition_time_embed_dim": 8 if tiny else 256,
        "projection_class_embeddings_input_dim": 64 if tiny else 2816,
        "norm_num_groups": 8 if tiny else 32,
    }
    return _Denoiser(
        diffusers.UNet2DConditionModel(  # pyright: ignore[reportPrivateImportUsage]
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            addition_embed_type="text_time",
            use_linear_projection=True,
            layers_per_block=2,
            **sizes,
        )
    )
