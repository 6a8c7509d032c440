"""Tiny models of transformers' registries, built from their configurations alone.

Fields are shrunk by the words of their names, so a new architecture needs no line here. Where the
tiny fields do not suit each other, a milder way to shrink is tried.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

REGISTRIES = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked-lm": "MASKED_LM",
    "image-classification": "IMAGE_CLASSIFICATION",
    "ctc": "CTC",
    "audio-classification": "AUDIO_CLASSIFICATION",
    "speech-seq2seq": "SPEECH_SEQ_2_SEQ",
}
NUM_LAYERS, VOCABULARY = 2, 256
_FIRST_SPECIAL = 230
_MOST_PARAMETERS = 40_000_000


class Rule(NamedTuple):
    """The least value of integer fields whose names match."""

    names: str
    value: int


_LAYERS = r"(num|n)_(hidden_)?layers?|.*num_(hidden_)?layers|(encoder|decoder)_layers|depth"
# The first rule that matches a name decides.
_RULES = (
    Rule(r"num_mel_bins|feature_size|num_channels|type_vocab_size|sampling_rate|num_labels", 10**9),
    Rule(r"vocab_size.*|.*_vocab_size|vocab_size_per_layer_input", VOCABULARY),
    Rule(_LAYERS, NUM_LAYERS),
    Rule(r".*(num_kv_heads|num_key_value_heads|multi_query_group_num)", 2),
    Rule(r"mamba_(n|num)_heads|linear_num_value_heads", 8),
    Rule(r"linear_num_key_heads", 4),
    Rule(r"mamba_(d_head|head_dim)|linear_(key|value)_head_dim", 16),
    Rule(r"(num|n)_heads?|.*num_attention_heads|.*attention_heads", 4),
    Rule(r"qk_head_dim|head_dim|.*_head_dim|d_head|d_kv|kv_channels|attention_head_size", 16),
    Rule(r".*lora_rank|time_step_rank", 16),
    Rule(r"(num|n)_group|topk_group", 1),
    Rule(r".*experts_per_tok|.*top_?k|moe_k|.*experts_per_token", 2),
    Rule(r".*(num|n)_shared_experts", 1),
    Rule(r"(num|n)_.*experts|moe_num_experts|num_experts", 4),
    Rule(r".*intermediate_(size|dim)|.*ffn_dim|n_inner|d_ff|d_inner|.*mlp_dim|.*ff_dim", 64),
    Rule(r".*hidden_size.*|.*d_model|n_embd|.*hidden_dim|.*embed_dim|.*embedding_size", 64),
    Rule(r".*embed_proj_dim|lru_width|projection_dim|.*_proj_dim|.*output_dim|dim|emb_dim", 64),
    Rule(r"max_source_positions|max_target_positions", 64),
    Rule(r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length", 128),
    Rule(r"image_size", 64),
    Rule(r"patch_size", 8),
    Rule(r"(sliding|attention)_window|window_size|.*chunk_size|block_size", 8),
    Rule(r".*state_size|mamba_d_state|num_buckets", 16),
)
_LISTS = (
    Rule(r"depths", 1),
    Rule(r"num_heads|num_attention_heads", 2),
)

# Fields that the names do not tell, by the type of the configuration.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "hidden_size": 64, "n_groups": 1},
    "mamba": {"time_step_rank": 4},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 16},
    "reformer": {
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh"],
    },
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "deberta-v2": {"pooler_hidden_size": 64},
    "xlstm": {"num_heads": 4, "num_blocks": 2},
}


def names_of(registry: str) -> list[str]:
    """The registered types of configuration, in the registry's order."""
    return list(_classes(registry))


def _classes(registry: str) -> dict[str, Any]:
    return getattr(modeling_auto, f"MODEL_FOR_{REGISTRIES[registry]}_MAPPING_NAMES")


def builders(registry: str, name: str) -> Iterator[Callable[[], nn.Module]]:
    """Ways to build a tiny model, the smallest first."""
    found = _classes(registry)[name]
    model_class = getattr(transformers, found if isinstance(found, str) else found[0])
    config_class = CONFIG_MAPPING[name]
    for make in (_made_from_fields, _changed_in_place, _with_few_layers):

        def build(make: Callable[..., PreTrainedConfig] = make) -> nn.Module:
            config = make(config_class)
            for part in _all_parts(config):
                if hasattr(part, "use_cache"):
                    part.use_cache = False
                _set_special_tokens(part, registry)
            with torch.device("meta"):
                weights = model_class(copy.deepcopy(config)).parameters()
            num_parameters = sum(each.numel() for each in weights)
            if num_parameters > _MOST_PARAMETERS:
                msg = f"the tiny build has {num_parameters:,} parameters"
                raise ValueError(msg)
            return model_class(config).train()

        yield build


def _set_special_tokens(config: Any, registry: str) -> None:
    """Those that the default configuration leaves out and training needs."""
    if registry == "ctc" and getattr(config, "vocab_size", None) is None:
        config.vocab_size = VOCABULARY
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)


# --- three ways to shrink -------------------------------------------------------------------------


def _made_from_fields(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Made anew from shrunk fields: derived fields follow."""
    return config_class(**_arguments(config_class()))


def _arguments(config: PreTrainedConfig) -> dict[str, Any]:
    accepted = inspect.signature(type(config).__init__).parameters
    arguments = {name: value for name, value in _shrunk_fields(config).items() if name in accepted}
    for name, part in _parts(config):
        arguments[name] = type(part)(**_arguments(part))
    return arguments


def _changed_in_place(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The default configuration with shrunk attributes: its own checks do not run."""
    config = config_class()
    for part in _all_parts(config):
        for name, value in _shrunk_fields(part).items():
            setattr(part, name, value)
    return config


def _with_few_layers(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """The default widths, with fewer layers and words, and smaller images."""
    config = config_class()
    for part in _all_parts(config):
        for name, value in _shrunk_fields(part).items():
            is_count = re.fullmatch(_LAYERS, name) or name in ("vocab_size", "image_size")
            if is_count or isinstance(value, list):
                setattr(part, name, value)
    return config


# --- fields ---------------------------------------------------------------------------------------


def _parts(config: PreTrainedConfig) -> list[tuple[str, PreTrainedConfig]]:
    """The configurations within a configuration, by field."""
    return [(n, value) for n, value in vars(config).items() if isinstance(value, PreTrainedConfig)]


def _all_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for _, part in _parts(config):
        yield from _all_parts(part)


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    hidden = ("transformers_version", "id2label", "label2id")
    return {
        name: value
        for name, value in vars(config).items()
        if not (name.startswith("_") or name in hidden or isinstance(value, PreTrainedConfig))
    }


def _shrunk_fields(config: PreTrainedConfig) -> dict[str, Any]:
    fields, num_layers = _fields(config), _num_layers(config)
    shrunk = {name: _shrunk(name, value, num_layers) for name, value in fields.items()}
    heads, shared = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if heads is not None and heads == shared:
        shrunk["num_key_value_heads"] = shrunk["num_attention_heads"]
    return shrunk | _OVERRIDES.get(config.model_type, {})


def _num_layers(config: PreTrainedConfig) -> int | None:
    fields = _fields(config)
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), None)


def _shrunk(name: str, value: Any, num_layers: int | None) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _shrunk_number(name, value)
    if isinstance(value, list) and value:
        return _shrunk_list(name, value, num_layers)
    return value


def _shrunk_number(name: str, value: int) -> int:
    if name.endswith(("token_id", "token_index", "_id")) and value >= VOCABULARY:
        return _FIRST_SPECIAL + sum(name.encode()) % (VOCABULARY - _FIRST_SPECIAL)
    rule = next((rule for rule in _RULES if re.fullmatch(rule.names, name)), None)
    return value if rule is None else min(value, rule.value)


def _shrunk_list(name: str, value: list[Any], num_layers: int | None) -> list[Any]:
    if num_layers is not None and len(value) == num_layers and num_layers > NUM_LAYERS:
        kinds = list(dict.fromkeys(value)) if all(isinstance(v, str) for v in value) else []
        return (kinds + value)[:NUM_LAYERS] if len(kinds) > 1 else value[:NUM_LAYERS]
    rule = next((rule for rule in _LISTS if re.fullmatch(rule.names, name)), None)
    if rule is not None and all(isinstance(v, int) for v in value):
        return [min(v, rule.value) for v in value]
    if name == "mrope_section":
        return [4, 2, 2]
    return value
