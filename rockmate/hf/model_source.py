"""What a person calls a model on the command line -> the model with a sample.

A Hugging Face configuration (a JSON file, a folder that holds one, or a name on the hub) is built
with random weights: memory and time do not depend on them, and nothing but a configuration is ever
fetched. "package.module:function" is called, and returns both.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate.extras import require
from rockmate.hf.source_check import FUNCTION_HINT, ModelSourceError, check_source, first_line
from rockmate.hf.synthetic_sample import SampleShape, make_sample

# In this order: most encoders can be decoders too, and most text models can classify.
_AUTO_CLASSES = (
    "AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification", "AutoModelForSequenceClassification", "AutoModel",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourcedModel:
    """A model ready to be planned for.

    Attributes:
        title: what it is and for which sample, in one line.
        model: in training mode.
        sample_input: as for `Planner`.
    """

    title: str
    model: nn.Module
    sample_input: Any


def load_model(
    source: str, shape: SampleShape | None = None, *, device: str = "cpu", dtype: str | None = None
) -> SourcedModel:
    """The model that `source` names.

    Args:
        source: see this module.
        shape: of the sample, for a configuration; a function makes a sample of its own.
        device: where a configuration's model and sample are made; "meta" makes neither weights nor
            values.
        dtype: of a configuration's weights: "float32" (default), "bfloat16" or "float16".

    Raises:
        ModelSourceError: there is no such model, or it cannot be built, or no sample made for it.
        MissingExtraError: transformers is not installed.
    """
    if ":" in source and not Path(source).exists():
        if shape not in (None, SampleShape()) or dtype is not None:
            raise ModelSourceError(
                "--batch, --tokens, --image-size and --dtype are for configurations, and "
                f"{source!r} makes its own model and sample. Leave them out."
            )
        return _from_function(source, device)
    return _from_configuration(source, shape or SampleShape(), device, dtype or "float32")


# --- a function -----------------------------------------------------------------------------------


def _from_function(source: str, device: str) -> SourcedModel:
    function = _function(source)
    try:
        with torch.device("meta") if device == "meta" else nullcontext():
            made = function()
    except Exception as error:
        hint = " It is called without arguments." if isinstance(error, TypeError) else ""
        raise ModelSourceError(f"{source} failed: {_last_line(error)}.{hint}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ModelSourceError(
            f"{source} returned {_described(made)}, not (model, sample_input), whose model is a "
            "torch.nn.Module."
        )
    model, sample_input = made
    return SourcedModel(title=f"{source}: {_size(model)}", model=model, sample_input=sample_input)


def _function(source: str) -> Callable[[], Any]:
    path, _, name = source.partition(":")
    if path.endswith(".py") or "/" in path:
        dotted = path.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ModelSourceError(
            f"{path!r} is a path. Write the module as it is imported from here: "
            f"{dotted}:{name or 'function'}"
        )
    if not path or not name.isidentifier():
        raise ModelSourceError(f"{source!r} names no function. {FUNCTION_HINT}")
    sys.path.insert(0, os.getcwd())  # it comes first, as for `python -m`
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or path
        place = f"no module {missing!r} is installed, nor in {os.getcwd()}"
        raise ModelSourceError(f"cannot import {path!r}: {place}. {FUNCTION_HINT}") from error
    except Exception as error:
        raise ModelSourceError(f"cannot import {path!r}: {_last_line(error)}.") from error
    finally:
        sys.path.remove(os.getcwd())
    function = getattr(module, name, None)
    if not callable(function):
        defined = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        known = f" It has {', '.join(sorted(defined)[:8])}." if defined else ""
        raise ModelSourceError(f"module {path!r} has no function {name!r}.{known} {FUNCTION_HINT}")
    return function


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error).removesuffix('.')}{where}"


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return f"a {type(value).__name__}"


# --- a configuration ------------------------------------------------------------------------------


def _from_configuration(source: str, shape: SampleShape, device: str, dtype: str) -> SourcedModel:
    check_device(device)
    transformers = require("transformers", extra="hf", purpose=f"the configuration {source!r}")
    config = _configuration(transformers, source)
    _prepare(config)
    model_class = _model_class(transformers, config)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(0)
            model = model_class(config)
    except Exception as error:
        raise ModelSourceError(
            f"{model_class.__name__} cannot be built from the configuration {source!r}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    weights_dtype = getattr(torch, dtype)
    model = model.to(weights_dtype).train()
    if type(model).__name__.endswith("LMHeadModel"):
        model.loss_type = "ForCausalLM"  # it would be taken anyway, but with a warning
    sample = make_sample(model, shape)
    sample = {
        name: value.to(device, weights_dtype if value.is_floating_point() else None)
        for name, value in sample.items()
    }
    shapes = ", ".join(
        f"{name} {' x '.join(map(str, value.shape))}" for name, value in sample.items()
    )
    return SourcedModel(
        title=f"{type(model).__name__} ({source}): {_size(model)}, {shapes}",
        model=model,
        sample_input=sample,
    )


def check_device(device: str) -> None:
    """Raises `ModelSourceError` for a device that is not here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelSourceError(
            f"device {device!r} cannot be used here: {first_line(error)} Give another --device, "
            "as cpu."
        ) from error


def _configuration(transformers: Any, source: str) -> Any:
    is_here = check_source(source)
    try:
        return transformers.AutoConfig.from_pretrained(source, local_files_only=is_here)
    except (OSError, ValueError, KeyError) as error:
        raise ModelSourceError(
            f"{source!r} is no configuration that transformers knows: {first_line(error)}"
        ) from error


def _prepare(config: Any) -> None:
    """What training needs and a configuration may leave open."""
    text = config.get_text_config()
    for part in {id(part): part for part in (config, text)}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False  # a training step has no use for it, and eager would hold it
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    if getattr(config, "problem_type", None) is None:
        config.problem_type = "single_label_classification"  # the labels of the sample


def _model_class(transformers: Any, config: Any) -> Any:
    """The first architecture of the configuration, else the first usual kind of model for it."""
    for name in getattr(config, "architectures", None) or ():
        model_class = getattr(transformers, name, None)
        if model_class is None:
            raise ModelSourceError(
                f"the configuration asks for {name}, which transformers {transformers.__version__} "
                "does not have. Change its `architectures`."
            )
        return model_class
    for auto_name in _AUTO_CLASSES:
        mapping = getattr(transformers, auto_name)._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
    raise ModelSourceError(
        f"transformers has no model to train for {type(config).__name__}. Name one in the "
        "`architectures` of the configuration."
    )


def _size(model: nn.Module) -> str:
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{number / 1e6:,.1f} M parameters" if number >= 1e5 else f"{number:,} parameters"
