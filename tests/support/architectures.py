"""Small configurations of Hugging Face architectures.

Two layers (one in each part of those that have two), width 32.

Dropout, tied weights, attention and experts are as the configurations have them by default. Off are
only what speech models choose by random numbers (which layers to skip, what to mask), since such
models are refused (`REFUSED`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bench.models.hf import halves, usual

Batch = dict[str, Any]
MakeBatch = Callable[[int], Batch]
_VOCABULARY, _TOKENS, _ROWS = 97, 12, 2
_IMAGE_TOKEN, _NUM_PATCHES = 4, 16


@dataclass(frozen=True)
class Architecture:
    """How to make a model, and a batch of it from a seed."""

    build: Callable[[], nn.Module]
    make_batch: MakeBatch


@dataclass(frozen=True)
class Refused(Architecture):
    """One that cannot be captured.

    `says` is what the error's text must hold (regular expressions).
    """

    says: tuple[str, ...]


def make(name: str) -> nn.Module:
    """The architecture of that name in training mode, with weights that depend on the name
    alone. A first call adds hooks where it asks for hidden states: that call is over."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = ARCHITECTURES[name].build().train()
        if name in ("llava", "segformer"):
            model(**ARCHITECTURES[name].make_batch(0))
        return model


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- batches --------------------------------------------------------------------------------------


def _words(seed: int, columns: int = _TOKENS) -> Tensor:
    return torch.randint(5, _VOCABULARY, (_ROWS, columns), generator=_generator(seed))


def causal_tokens(seed: int) -> Batch:
    """Tokens to be predicted, each from those before it; no mask."""
    words = _words(seed)
    return {"input_ids": words, "labels": words.clone()}


def masked_tokens(seed: int) -> Batch:
    """Tokens some of which are to be found, in rows that end in padding, whose length differs from
    batch to batch."""
    words = _words(seed)
    mask = torch.ones_like(words)
    mask[1, -1 - seed % 4 :] = 0
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }


def _translated_tokens(seed: int) -> Batch:
    batch = masked_tokens(seed)
    return {**batch, "labels": _words(seed + 100, columns=6)}


def _images(seed: int, *, pixels: int = 32) -> Batch:
    labels = torch.randint(0, 5, (_ROWS,), generator=_generator(seed))
    return {
        "pixel_values": torch.randn(_ROWS, 3, pixels, pixels, generator=_generator(seed)),
        "labels": labels,
    }


def _segmented_images(seed: int) -> Batch:
    labels = torch.randint(0, 5, (_ROWS, 32, 32), generator=_generator(seed))
    return {
        "pixel_values": torch.randn(_ROWS, 3, 32, 32, generator=_generator(seed)),
        "labels": labels,
    }


def _captioned_images(seed: int) -> Batch:
    return {**masked_tokens(seed), "pixel_values": _images(seed)["pixel_values"]}


def _paired_images(seed: int) -> Batch:
    batch = _captioned_images(seed)
    del batch["labels"]
    return {**batch, "return_loss": True}


def _illustrated_tokens(seed: int) -> Batch:
    """A token for each of the image's patches, then text."""
    text = masked_tokens(seed)
    patches = torch.full((_ROWS, _NUM_PATCHES), _IMAGE_TOKEN)
    ends = {
        "input_ids": patches,
        "attention_mask": torch.ones_like(patches),
        "labels": torch.full_like(patches, -100),
    }
    joined = {name: torch.cat([ends[name], text[name]], 1) for name in ends}
    return {**joined, "pixel_values": _images(seed)["pixel_values"]}


def _spectra(seed: int) -> Batch:
    return {
        "input_features": torch.randn(_ROWS, 8, 32, generator=_generator(seed)),
        "labels": _words(seed, columns=6),
    }


def _sounds(seed: int) -> Batch:
    labels = torch.randint(0, 5, (_ROWS,), generator=_generator(seed))
    return {"input_values": torch.randn(_ROWS, 400, generator=_generator(seed)), "labels": labels}


def _transcribed_sounds(seed: int) -> Batch:
    return {**_sounds(seed), "labels": _words(seed, columns=4)}


# --- models ---------------------------------------------------------------------------------------


def _model(kind: str, head: str, sizes: dict[str, Any], **more: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **more})
    return getattr(transformers, f"{kind}{head}")(config)


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = usual(2, 32, 4, 48, _VOCABULARY) | _SPECIAL | {"max_position_embeddings": 64}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
_CLASSES = {"num_labels": 5, "problem_type": "single_label_classification"}
_VISION = usual(2, 32, 4, 48) | {"image_size": 32, "patch_size": 8} | _CLASSES
_TRANSLATOR = halves(1, 32, 4, ffn_dim=48) | _SPECIAL
_TRANSLATOR |= {"vocab_size": _VOCABULARY, "max_position_embeddings": 64}
_TRANSLATOR |= {"decoder_start_token_id": 2, "forced_eos_token_id": 2}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 2]} | _CLASSES
_SOUND = {
    **_ENCODER,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_feat_extract_layers": 2,
    "num_labels": 5,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _decoder(kind: str, **more: Any) -> Architecture:
    return Architecture(partial(_model, kind, "ForCausalLM", _DECODER, **more), causal_tokens)


def _encoder(kind: str, **more: Any) -> Architecture:
    return Architecture(partial(_model, kind, "ForMaskedLM", _ENCODER, **more), masked_tokens)


def _translator(kind: str, sizes: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(
        partial(_model, kind, "ForConditionalGeneration", sizes, **more), _translated_tokens
    )


def _classifier(kind: str, sizes: dict[str, Any] = _VISION, **more: Any) -> Architecture:
    return Architecture(partial(_model, kind, "ForImageClassification", sizes, **more), _images)


def _small(*names: str) -> dict[str, Any]:
    """The sizes of those names."""
    return {name: (_DECODER | _VISION)[name] for name in names}


_TOWER = usual(1, 32, 4, 48)
_TEXT_TOWER = {**_TOWER, **_SPECIAL, **_small("vocab_size", "max_position_embeddings")}
_VISION_TOWER = {**_TOWER, **_small("image_size", "patch_size")}


def _two_towers(kind: str) -> nn.Module:
    towers = {"text_config": dict(_TEXT_TOWER), "vision_config": dict(_VISION_TOWER)}
    return _model(kind, "Model", towers, projection_dim=16)


def _gemma3() -> nn.Module:
    """One layer that attends to a window of tokens, one that attends to all."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = _DECODER | {"sliding_window": 6, "layer_types": kinds}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes))


def _blip() -> nn.Module:
    text = {**_TEXT_TOWER, "encoder_hidden_size": 32, "sep_token_id": 2}
    towers = {"text_config": text, "vision_config": dict(_VISION_TOWER)}
    return _model("Blip", "ForConditionalGeneration", towers, projection_dim=16)


def _llava() -> nn.Module:
    text = transformers.LlamaConfig(**{**_DECODER, "num_hidden_layers": 1})
    vision = transformers.CLIPVisionConfig(**_VISION_TOWER)
    sizes = {"text_config": text, "vision_config": vision, "image_token_index": _IMAGE_TOKEN}
    return _model("Llava", "ForConditionalGeneration", sizes)


ARCHITECTURES: dict[str, Architecture] = {
    # Decoders.
    "gpt2": Architecture(partial(_model, "GPT2", "LMHeadModel", _DECODER), causal_tokens),
    "gpt-j": _decoder("GPTJ", n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    "gpt-neox": _decoder("GPTNeoX"),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3"),
    "gemma": _decoder("Gemma"),
    "gemma2": _decoder("Gemma2", sliding_window=6),
    "gemma3": Architecture(_gemma3, causal_tokens),
    "phi3": _decoder("Phi3"),
    "opt": _decoder("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "bloom": _decoder("Bloom", n_layer=2, n_head=4),
    "falcon": Architecture(partial(_model, "Falcon", "ForCausalLM", _ENCODER), causal_tokens),
    "stablelm": _decoder("StableLm"),
    "cohere": _decoder("Cohere"),
    "olmo2": _decoder("Olmo2"),
    "granite": _decoder("Granite"),
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "qwen3-moe": _decoder("Qwen3Moe", num_experts=4, **_EXPERTS),
    "gpt-oss": _decoder("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "deepseek-v3": _decoder(
        "DeepseekV3",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        **_EXPERTS,
    ),
    "mamba": _decoder("Mamba", state_size=8),
    "mamba2": _decoder("Mamba2", num_heads=8, state_size=8, n_groups=2, chunk_size=4),
    # Encoders.
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "xlm-roberta": _encoder("XLMRoberta"),
    "distilbert": _encoder("DistilBert", dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    "albert": _encoder("Albert", embedding_size=16),
    "deberta-v2": _encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    "modernbert": _encoder("ModernBert", cls_token_id=1, sep_token_id=2, local_attention=6),
    "electra": _encoder("Electra", embedding_size=16),
    # Encoders with decoders.
    "t5": _translator("T5", _T5),
    "mt5": _translator("MT5", _T5),
    "bart": _translator("Bart", _TRANSLATOR),
    "pegasus": _translator("Pegasus", _TRANSLATOR),
    "whisper": Architecture(
        partial(
            _model,
            "Whisper",
            "ForConditionalGeneration",
            _TRANSLATOR,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
        ),
        _spectra,
    ),
    # Images.
    "vit": _classifier("ViT"),
    "deit": _classifier("DeiT"),
    "beit": _classifier("Beit"),
    "dinov2": _classifier("Dinov2"),
    "swin": _classifier(
        "Swin",
        _small("num_labels", "image_size", "problem_type"),
        patch_size=4,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": _classifier("ConvNext", _STAGES, num_stages=2),
    "resnet": _classifier("ResNet", _STAGES, embedding_size=8, layer_type="bottleneck"),
    "regnet": _classifier("RegNet", _STAGES, embedding_size=8, groups_width=8),
    "segformer": Architecture(
        partial(
            _model,
            "Segformer",
            "ForSemanticSegmentation",
            {"num_labels": 5},
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
        ),
        _segmented_images,
    ),
    # Images and text.
    "clip": Architecture(partial(_two_towers, "CLIP"), _paired_images),
    "siglip": Architecture(partial(_two_towers, "Siglip"), _paired_images),
    "blip": Architecture(_blip, _captioned_images),
    "llava": Architecture(_llava, _illustrated_tokens),
    # Sound.
    "wav2vec2": Architecture(
        partial(
            _model,
            "Wav2Vec2",
            "ForSequenceClassification",
            _SOUND,
            apply_spec_augment=False,
            layerdrop=0.0,
        ),
        _sounds,
    ),
    # It reads from the mask which tokens attend to all.
    "longformer": Architecture(
        partial(_model, "Longformer", "ForMaskedLM", _ENCODER, attention_window=4), masked_tokens
    ),
}

_NEXT_STEP = "replace it by a tensor operation .*, or run that submodule as it is"

REFUSED: dict[str, Refused] = {
    # The loss returns a tensor as large as the longest label.
    "wav2vec2-ctc": Refused(
        partial(_model, "Wav2Vec2", "ForCTC", _SOUND, apply_spec_augment=False, layerdrop=0.0),
        _transcribed_sounds,
        ("ctc_loss", "replace it by a tensor operation of fixed shape", "keep that part outside"),
    ),
    # Time steps are masked by NumPy's random numbers.
    "wav2vec2-augmented": Refused(
        partial(_model, "Wav2Vec2", "ForSequenceClassification", _SOUND, layerdrop=0.0),
        _sounds,
        ("NumPy's random numbers", "Draw with torch", "apply_spec_augment=False"),
    ),
    # Each layer is skipped or not by a random number.
    "wav2vec2-layerdrop": Refused(
        partial(_model, "Wav2Vec2", "ForSequenceClassification", _SOUND, apply_spec_augment=False),
        _sounds,
        ("wav2vec2.encoder", "setting config.layerdrop=0.0", _NEXT_STEP),
    ),
}


# Models that transformers before 5.23 lets nobody capture: their forward reads a random number to
# drop a layer, or the backward of their experts reads the number of tokens of each.
NEWER_TRANSFORMERS = (5, 23)
NEEDS_NEWER = frozenset(
    {
        *("bart", "opt", "pegasus", "wav2vec2", "wav2vec2-ctc", "whisper"),
        *("deepseek-v3", "gpt-oss", "mixtral", "qwen3-moe"),
    }
)


def skip_if_refused(name: str) -> None:
    """Skips the test if the installed transformers has no version of a model to capture."""
    installed = tuple(map(int, transformers.__version__.split(".")[:2]))
    if name in NEEDS_NEWER and installed < NEWER_TRANSFORMERS:
        pytest.skip(f"{name} of transformers {transformers.__version__} cannot be captured")
