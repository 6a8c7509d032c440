"""The models of `bench.cuda`: published sizes in bfloat16, with a batch of any number of rows.

The tiny variants have the same classes and are meant for tests on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """One model of the campaign.

    Attributes:
        build: gives the model on the current default device and in the default dtype.
        make_batch: gives the batch of so many rows from a generator, on the CPU in float32.
        num_rows: rows of the batch whose memory and time are measured.
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
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
        made = self.make_batch(num_rows or self.num_rows, torch.Generator().manual_seed(seed))
        return {
            name: value.to(device, torch.bfloat16 if value.is_floating_point() else value.dtype)
            for name, value in made.items()
        }


def gpu_models(*, tiny: bool = False) -> dict[str, GpuModel]:
    """Name -> model."""
    tokens = 16 if tiny else 1024
    models = {
        "gpt2-medium": _causal(partial(_gpt2, tiny), 97 if tiny else 50257, tokens, 8),
        "llama-1b": _causal(
            partial(_llama, tiny, 16, 2048, 32, 8192), _vocabulary(tiny), 4 * tokens, 2
        ),
        "llama-8b-lora": _causal(partial(_lora, tiny), _vocabulary(tiny), 2 * tokens, 2),
        "qwen3-4b": _causal(partial(_qwen3, tiny), 97 if tiny else 151936, 2 * tokens, 2),
        "bert-large": _classified(partial(_bert, tiny), 97 if tiny else 30522, tokens // 2, 32),
        "vit-large": _images(partial(_vit, tiny), 32 if tiny else 224, 128),
        "resnet-50": _images(partial(_resnet, tiny), 32 if tiny else 224, 256),
        "whisper-medium": _sound(partial(_whisper, tiny), tiny, 8),
        "sdxl-unet": _denoised(partial(_sdxl, tiny), tiny, 4),
    }
    return {name: _few_rows(model) if tiny else model for name, model in models.items()}


def _few_rows(model: GpuModel) -> GpuModel:
    return GpuModel(build=model.build, make_batch=model.make_batch, num_rows=2)


def _vocabulary(tiny: bool) -> int:
    return 97 if tiny else 128256


# --- batches --------------------------------------------------------------------------------------


def _tokens(generator: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(3, vocabulary, shape, generator=generator)


def _causal(
    build: Callable[[], nn.Module], vocabulary: int, num_tokens: int, num_rows: int
) -> GpuModel:
    def make(rows: int, generator: torch.Generator) -> Batch:
        ids = _tokens(generator, vocabulary, rows, num_tokens)
        return {"input_ids": ids, "labels": ids}

    return GpuModel(build=build, make_batch=make, num_rows=num_rows)


def _classified(
    build: Callable[[], nn.Module], vocabulary: int, num_tokens: int, num_rows: int
) -> GpuModel:
    def make(rows: int, generator: torch.Generator) -> Batch:
        ids = _tokens(generator, vocabulary, rows, num_tokens)
        return {"input_ids": ids, "labels": torch.randint(2, (rows,), generator=generator)}

    return GpuModel(build=build, make_batch=make, num_rows=num_rows)


def _images(build: Callable[[], nn.Module], pixels: int, num_rows: int) -> GpuModel:
    def make(rows: int, generator: torch.Generator) -> Batch:
        images = torch.randn(rows, 3, pixels, pixels, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(10, (rows,), generator=generator)}

    return GpuModel(build=build, make_batch=make, num_rows=num_rows)


def _sound(build: Callable[[], nn.Module], tiny: bool, num_rows: int) -> GpuModel:
    positions, mels, num_tokens, vocabulary = (16, 80, 8, 97) if tiny else (1500, 80, 128, 51865)

    def make(rows: int, generator: torch.Generator) -> Batch:
        sound = torch.randn(rows, mels, 2 * positions, generator=generator)
        return {
            "input_features": sound,
            "labels": _tokens(generator, vocabulary, rows, num_tokens),
        }

    return GpuModel(build=build, make_batch=make, num_rows=num_rows)


def _denoised(build: Callable[[], nn.Module], tiny: bool, num_rows: int) -> GpuModel:
    size, length, text, pooled = (8, 4, 16, 16) if tiny else (128, 77, 2048, 1280)

    def make(rows: int, generator: torch.Generator) -> Batch:
        return {
            "sample": torch.randn(rows, 4, size, size, generator=generator),
            "noise": torch.randn(rows, 4, size, size, generator=generator),
            "timestep": torch.randint(0, 1000, (rows,), generator=generator),
            "encoder_hidden_states": torch.randn(rows, length, text, generator=generator),
            "text_embeds": torch.randn(rows, pooled, generator=generator),
            "time_ids": torch.ones(rows, 6),
        }

    return GpuModel(build=build, make_batch=make, num_rows=num_rows)


# --- models ---------------------------------------------------------------------------------------


def _gpt2(tiny: bool) -> nn.Module:
    layers, width, heads, vocabulary = (2, 32, 2, 97) if tiny else (24, 1024, 16, 50257)
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def _decoder_sizes(
    tiny: bool, layers: int, width: int, heads: int, inner: int, vocabulary: int
) -> dict[str, Any]:
    if tiny:
        layers, width, heads, inner, vocabulary = 2, 32, 4, 48, 97
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 2 if tiny else 8,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "use_cache": False,
    }


def _llama(tiny: bool, layers: int, width: int, heads: int, inner: int) -> nn.Module:
    sizes = _decoder_sizes(tiny, layers, width, heads, inner, 128256)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def _lora(tiny: bool) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = _llama(tiny, 32, 4096, 32, 14336)
    return peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]


def _qwen3(tiny: bool) -> nn.Module:
    sizes = _decoder_sizes(tiny, 36, 2560, 32, 9728, 151936)
    config = transformers.Qwen3Config(**sizes, head_dim=8 if tiny else 128)
    return transformers.Qwen3ForCausalLM(config)


def _bert(tiny: bool) -> nn.Module:
    layers, width, heads, vocabulary = (2, 32, 2, 97) if tiny else (24, 1024, 16, 30522)
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
    )
    return transformers.BertForSequenceClassification(config)


def _vit(tiny: bool) -> nn.Module:
    layers, width, heads, pixels = (2, 32, 2, 32) if tiny else (24, 1024, 16, 224)
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=pixels,
        patch_size=16,
        num_labels=10,  # pyright: ignore[reportCallIssue]
    )
    return transformers.ViTForImageClassification(config)


def _resnet(tiny: bool) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
    config = transformers.ResNetConfig(**(sizes if tiny else {}), num_labels=10)  # pyright: ignore
    return transformers.ResNetForImageClassification(config)


def _whisper(tiny: bool) -> nn.Module:
    layers, width, heads, vocabulary, positions = (
        (2, 36, 6, 97, 16) if tiny else (24, 1024, 16, 51865, 1500)
    )
    halves: dict[str, Any] = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in (
            ("layers", layers),
            ("attention_heads", heads),
            ("ffn_dim", 4 * width),
            ("layerdrop", 0.0),
        )
    }
    config = transformers.WhisperConfig(
        **halves,
        d_model=width,
        vocab_size=vocabulary,
        max_source_positions=positions,
        max_target_positions=8 if tiny else 448,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    return transformers.WhisperForConditionalGeneration(config)


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
