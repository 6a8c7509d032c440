"""Tiny models of transformers' registries, built from their configurations alone.

Fields are shrunk by the words of their names (tiny.toml), so that a further architecture needs no
line here. Where the tiny fields do not suit each other, a milder way to shrink is tried.
"""

from __future__ import annotations

import copy
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
REGISTRIES: dict[str, str] = _TABLE["registries"]
NUM_LAYERS, VOCABULARY = 2, 256
_FIRST_SPECIAL = 230
_MOST_PARAMETERS = 40_000_000
_LAYERS = next(names for names in _TABLE["integers"] if names.endswith("depth"))


def _limit(kind: str, name: str) -> int | None:
    """The most that a field of that name may be; None if no rule matches."""
    return next((n for names, n in _TABLE[kind].items() if re.fullmatch(names, name)), None)


def names_of(registry: str) -> list[str]:
    """The types of configuration, in the registry's order; any-to-any: those of no other one."""
    if registry != "any-to-any":
        return list(_classes(registry))
    known = {
        str(each) for other in REGISTRIES if other != registry for each in _classes(other).values()
    }
    return [name for name, each in _classes(registry).items() if str(each) not in known]


def _classes(registry: str) -> dict[str, Any]:
    return getattr(modeling_auto, f"MODEL_FOR_{REGISTRIES[registry]}_MAPPING_NAMES")


def builders(registry: str, name: str, **fields: Any) -> Iterator[Callable[[], nn.Module]]:
    """Ways to build a tiny model, the smallest first, which has `fields` as they are given."""
    found = _classes(registry)[name]
    model_class = getattr(transformers, found if isinstance(found, str) else found[0])
    config_class = CONFIG_MAPPING[name]
    in_place = [partial(_changed_in_place, is_taken=each) for each in _TAKEN]
    for make in (partial(_made_from_fields, **fields), _changed_in_place, *in_place):

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
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, 0) is None:
            setattr(config, name, _FIRST_SPECIAL)
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)


# --- ways to shrink -------------------------------------------------------------------------


def _made_from_fields(config_class: type[PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    """Made anew from shrunk fields: derived fields follow."""
    return config_class(**_arguments(config_class()) | fields)


def _arguments(config: PreTrainedConfig) -> dict[str, Any]:
    accepted = inspect.signature(type(config).__init__).parameters
    arguments = {name: value for name, value in _shrunk_fields(config).items() if name in accepted}
    for name, part in _parts(config):
        arguments[name] = type(part)(**_arguments(part))
    return arguments


def _changed_in_place(
    config_class: type[PreTrainedConfig], is_taken: Callable[[str, Any], bool] = lambda *_: True
) -> PreTrainedConfig:
    """The default configuration with shrunk attributes: its own checks do not run."""
    config = config_class()
    for part in _all_parts(config):
        for name, value in _shrunk_fields(part).items():
            if is_taken(name, value):
                setattr(part, name, value)
    return config


_SIZES = ("vocab_size", "image_size", "num_queries")
# Which fields are shrunk: layers at the default widths; widths alone, for models that take the
# results of certain layers; sizes alone.
_TAKEN: tuple[Callable[[str, Any], bool], ...] = (
    lambda name, value: bool(re.fullmatch(_LAYERS, name)) or name in _SIZES or type(value) is list,
    lambda name, value: not isinstance(value, list | tuple) and not re.fullmatch(_LAYERS, name),
    lambda name, _: name in _SIZES,
)


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
    shrunk |= _TABLE["fields"].get(config.model_type, {})
    _fit_sections(fields, shrunk)
    return shrunk


def _fit_sections(fields: dict[str, Any], shrunk: dict[str, Any]) -> None:
    """Parts of a head that turn with time, height and width: as many of it as before."""
    rope, given = shrunk.get("rope_parameters"), fields.get("rope_parameters")
    given = given.get("mrope_section") if isinstance(given, dict) else None
    if not isinstance(rope, dict) or not given:
        return
    before, after = map(_head_size, (fields, shrunk))
    parts = [max(1, part * after // before) for part in given]
    parts[0] += sum(given) * after // before - sum(parts)
    rope["mrope_section"] = parts


def _head_size(fields: dict[str, Any]) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def _num_layers(config: PreTrainedConfig) -> int | None:
    fields = _fields(config)
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    return next((fields[name] for name in names if isinstance(fields.get(name), int)), None)


def _shrunk(name: str, value: Any, num_layers: int | None) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _shrunk_number(name, value)
    if isinstance(value, list | tuple) and value:
        return _shrunk_list(name, [*value], num_layers)
    if isinstance(value, dict):
        return {key: _shrunk(key, each, num_layers) for key, each in value.items()}
    return value


def _shrunk_number(name: str, value: int) -> int:
    if name.endswith(("token_id", "token_index", "_id")) and value >= VOCABULARY:
        return _FIRST_SPECIAL + sum(name.encode()) % (VOCABULARY - _FIRST_SPECIAL)
    limit = _limit("integers", name)
    return value if limit is None else min(value, limit)


def _shrunk_list(name: str, value: list[Any], num_layers: int | None) -> list[Any]:
    if num_layers is not None and len(value) == num_layers and num_layers > NUM_LAYERS:
        kinds = list(dict.fromkeys(value)) if all(isinstance(v, str) for v in value) else []
        return (kinds + value)[:NUM_LAYERS] if len(kinds) > 1 else value[:NUM_LAYERS]
    if name == "image_grid_pinpoints":
        return [[_limit("integers", "image_size")] * 2]
    if name.startswith("vision_feature_layer"):
        return [max(-NUM_LAYERS, min(layer, NUM_LAYERS - 1)) for layer in value]
    limit = _limit("lists", name)
    if limit is not None and all(isinstance(v, int) for v in value):
        return [min(v, limit) for v in value]
    return value
