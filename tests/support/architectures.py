"""Small models of Hugging Face architectures, from their configurations by `bench.registries`.

Two layers (two in each part of those that have two), width 64. Dropout, tied weights, attention and
experts are as the configurations have them by default. Off are only what speech models choose by
random numbers (which layers to skip, what to mask), since such models are refused (`REFUSED`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bench.models.hf import TOKENS, usual
from bench.registries.batches import make_batch
from bench.registries.tiny import builders

Batch = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A type of configuration in a registry, with fields that are to have other values.

    `says` is what the error's text must hold (regular expressions) if it cannot be captured.
    """

    registry: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """A model in training mode, with weights that depend on the architecture alone."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            return next(builders(self.registry, self.name, **self.fields))()

    def make_batch(self, seed: int) -> Batch:
        """The same for the same seed. Rows of words that need not be predicted one from another end
        in padding, whose length differs from batch to batch."""
        batch = make_batch(self.registry, self._first, seed)
        batch.pop("image_sizes", None)  # of other towers of llava than the default one
        if self.registry in ("causal-lm", "zero-shot-image-classification"):
            return batch
        return padded(batch, seed) if "input_ids" in batch else batch

    @functools.cached_property
    def _first(self) -> nn.Module:
        return self.build()


def padded(batch: Batch, seed: int) -> Batch:
    """With a mask of padding at the end of the second row, which the loss leaves out."""
    words, labels = batch["input_ids"], batch["labels"]
    mask = torch.ones_like(words)
    mask[1, -1 - seed % 4 :] = 0
    if labels.shape == words.shape:
        labels = labels.masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask, "labels": labels}


def masked_tokens(seed: int) -> Batch:
    """Two rows of twelve tokens, to be found, or to be predicted each from those before it."""
    words = torch.randint(10, 200, (2, 12), generator=torch.Generator().manual_seed(seed))
    return padded({"input_ids": words, "labels": words.clone()}, seed)


def make(name: str) -> nn.Module:
    """The architecture of that name. A first call adds hooks where it asks for hidden states: that
    call is over."""
    model = ARCHITECTURES[name].build()
    if name in ("llava", "segformer"):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            model(**ARCHITECTURES[name].make_batch(0))
    return model


def case(name: str) -> tuple[Any, Batch]:
    """The architecture of that name and its first batch."""
    return make(name), ARCHITECTURES[name].make_batch(0)


_NAMES = {
    "causal-lm": "bloom cohere deepseek_v3 falcon gemma gemma2 gemma3_text gpt2 gpt_neox gpt_oss"
    " gptj granite llama mamba mamba2 mistral mixtral olmo2 opt phi3 qwen2 qwen3 qwen3_moe"
    " stablelm",
    "masked-lm": "albert bert deberta-v2 distilbert electra longformer modernbert roberta"
    " xlm-roberta",
    "seq2seq-lm": "bart mt5 pegasus t5",
    "speech-seq2seq": "whisper",
    "image-classification": "beit convnext deit dinov2 regnet resnet swin vit",
    "semantic-segmentation": "segformer",
    "zero-shot-image-classification": "clip siglip",
    "image-text-to-text": "blip llava",
    "audio-classification": "wav2vec2",
}
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 2]}
_CONVOLUTIONS = {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4]}
_SOUND = {**_CONVOLUTIONS, "num_feat_extract_layers": 2}
_STEADY = {**_SOUND, "apply_spec_augment": False, "layerdrop": 0.0}
_FIELDS: dict[str, dict[str, Any]] = {
    "bert": {"intermediate_size": 96},
    "convnext": {**_STAGES, "num_stages": 2},
    "deberta-v2": {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    },
    "gptj": {"rotary_dim": 8},
    "llama": {"intermediate_size": 96},
    "mistral": {"sliding_window": 4096},
    "modernbert": {"local_attention": 6},
    "qwen3_moe": {"num_local_experts": 4, "moe_intermediate_size": 96},
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 8},
    "resnet": {**_STAGES, "embedding_size": 8, "layer_type": "bottleneck"},
    "segformer": {
        "hidden_sizes": [16, 32], "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    },
    "siglip": {"text_config": {**usual(2, 64, 4, 64, 256), "projection_size": 64, **TOKENS}},
    "swin": {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4],
        "window_size": 4,
    },
    "wav2vec2": _STEADY,
}  # fmt: skip
ARCHITECTURES = {
    name: Architecture(registry, name, _FIELDS.get(name, {}))
    for registry, names in _NAMES.items()
    for name in names.split()
}
_NEXT_STEP = "replace it by a tensor operation .*, or run that submodule as it is"
REFUSED = {
    # The loss returns a tensor as large as the longest label.
    "wav2vec2-ctc": Architecture(
        "ctc", "wav2vec2", _STEADY,
        ("ctc_loss", "replace it by a tensor operation of fixed shape", "keep that part outside"),
    ),
    # Time steps are masked by NumPy's random numbers.
    "wav2vec2-augmented": Architecture(
        "audio-classification", "wav2vec2", {**_SOUND, "layerdrop": 0.0},
        ("NumPy's random numbers", "Draw with torch", "apply_spec_augment=False"),
    ),
    # Each layer is skipped or not by a random number.
    "wav2vec2-layerdrop": Architecture(
        "audio-classification", "wav2vec2", {**_SOUND, "apply_spec_augment": False},
        ("wav2vec2.encoder", "setting config.layerdrop=0.0", _NEXT_STEP),
    ),
}  # fmt: skip


# Models that transformers before 5.23 lets nobody capture: their forward reads a random number to
# drop a layer, or the backward of their experts reads the number of tokens of each.
_NEWER_TRANSFORMERS = (5, 23)
_NEEDS_NEWER = (
    "bart deepseek_v3 gpt_oss mixtral opt pegasus qwen3_moe wav2vec2 wav2vec2-ctc whisper"
)


def skip_if_refused(name: str) -> None:
    """Skips the test if the installed transformers has no version of a model to capture."""
    installed = tuple(map(int, transformers.__version__.split(".")[:2]))
    if name in _NEEDS_NEWER.split() and installed < _NEWER_TRANSFORMERS:
        pytest.skip(f"{name} of transformers {transformers.__version__} cannot be captured")
