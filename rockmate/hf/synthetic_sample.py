"""A sample input for a Hugging Face model, from its configuration and its forward's arguments.

Its shapes are right and its values random.

Only shapes and dtypes matter to a plan. Labels are among the arguments wherever the model computes
a loss of its own.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rockmate.hf.source_check import ModelSourceError

Sample = dict[str, Tensor]

_MASKED_SHARE = 0.15
_IGNORED = -100  # what the library's losses skip
_DEFAULT_TOKENS, _DEFAULT_PIXELS = 256, 224
_NUM_SPECIAL = 3  # the lowest token ids often pad, begin and end


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """How large a sample is to be; None leaves it to the model's configuration.

    Attributes:
        batch_size: sequences or images.
        num_tokens: in a sequence.
        image_size: pixels along an image's side.
    """

    batch_size: int = 2
    num_tokens: int | None = None
    image_size: int | None = None


def make_sample(model: nn.Module, shape: SampleShape) -> Sample:
    """Keyword arguments for one training call of a Hugging Face model.

    Raises:
        ModelSourceError: the model takes something that is not known here, or the shape does not
            suit it.
    """
    accepted = inspect.signature(model.forward).parameters.keys()
    main = getattr(model, "main_input_name", "input_ids")
    makers = {"input_ids": _tokens, "pixel_values": _images, "input_features": _sound}
    if main not in makers or main not in accepted:
        raise ModelSourceError(
            f"{type(model).__name__} takes {main!r}, and no sample of that is made here. "
            f"{_OWN_SAMPLE}"
        )
    if shape.image_size is not None and main != "pixel_values":
        raise ModelSourceError(
            f"--image-size is for models of images, and {type(model).__name__} takes {main!r}. "
            "Leave it out."
        )
    if shape.num_tokens is not None and main == "pixel_values":
        raise ModelSourceError(
            f"--tokens is for models of text, and {type(model).__name__} takes {main!r}. Leave it "
            "out."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sample = makers[main](model, shape)
    unknown = sorted(sample.keys() - accepted)
    if unknown:
        raise ModelSourceError(
            f"{type(model).__name__} does not take {unknown[0]!r}, which its kind of model should. "
            f"{_OWN_SAMPLE}"
        )
    return sample


_OWN_SAMPLE = (
    "Write a function that returns (model, sample_input) and give it as package.module:function; a "
    "sample input is a tensor, a tuple or a mapping of keyword arguments."
)


# --- text -----------------------------------------------------------------------------------------


def _tokens(model: Any, shape: SampleShape) -> Sample:
    config, kind = model.config, type(model).__name__
    length = _length(config, shape)
    words = _words(config, (shape.batch_size, length))
    if config.is_encoder_decoder and "Classification" in kind:
        # The classified state is that of the one closing token.
        words[:, -1] = config.eos_token_id or 0
    sample: Sample = {"input_ids": words}
    if kind.endswith(("ForMaskedLM", "ForPreTraining")):
        hidden = torch.rand(words.shape) < _MASKED_SHARE
        hidden[:, 0] = True  # a loss over no token is not a number
        sample["labels"] = words.masked_fill(~hidden, _IGNORED)
        if "next_sentence_label" in inspect.signature(model.forward).parameters:
            sample["next_sentence_label"] = torch.randint(2, (shape.batch_size,))
    elif kind.endswith("ForQuestionAnswering"):
        sample |= {
            name: torch.randint(length, (shape.batch_size,))
            for name in ("start_positions", "end_positions")
        }
    elif kind.endswith("ForSequenceClassification"):
        sample["labels"] = torch.randint(config.num_labels, (shape.batch_size,))
    elif kind.endswith("ForTokenClassification"):
        sample["labels"] = torch.randint(config.num_labels, tuple(words.shape))
    elif config.is_encoder_decoder and _has_labels(model):
        sample["labels"] = _words(config, (shape.batch_size, length))
    elif kind.endswith(("ForCausalLM", "LMHeadModel")):
        sample["labels"] = words.clone()
    elif _has_labels(model):
        raise ModelSourceError(
            f"{kind} takes labels, and what they are is not known here. {_OWN_SAMPLE}"
        )
    elif config.is_encoder_decoder:
        sample["decoder_input_ids"] = _words(config, (shape.batch_size, length))
    return sample


def _length(config: Any, shape: SampleShape) -> int:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = shape.num_tokens or min(_DEFAULT_TOKENS, longest or _DEFAULT_TOKENS)
    if longest is not None and length > longest:
        raise ModelSourceError(
            f"--tokens {length} is more than the {longest} positions of the model. Take {longest} "
            "or fewer."
        )
    return length


def _words(config: Any, shape: tuple[int, int]) -> Tensor:
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not vocabulary:
        raise ModelSourceError(
            f"{type(config).__name__} names no vocab_size, so no tokens can be drawn. {_OWN_SAMPLE}"
        )
    lowest = _NUM_SPECIAL if vocabulary > 2 * _NUM_SPECIAL else 0
    special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "eos", "bos")}
    ordinary = next((token for token in range(lowest, vocabulary) if token not in special), 0)
    words = torch.randint(lowest, vocabulary, shape)
    for token in special:
        words[words == token] = ordinary
    return words


def _has_labels(model: Any) -> bool:
    return "labels" in inspect.signature(model.forward).parameters


# --- images and sound -----------------------------------------------------------------------------


def _images(model: Any, shape: SampleShape) -> Sample:
    config, kind = model.config, type(model).__name__
    size = shape.image_size or getattr(config, "image_size", None) or _DEFAULT_PIXELS
    height, width = size if isinstance(size, list | tuple) else (size, size)
    num_channels = getattr(config, "num_channels", 3)
    sample = {"pixel_values": torch.randn(shape.batch_size, num_channels, height, width)}
    if kind.endswith("ForImageClassification"):
        sample["labels"] = torch.randint(config.num_labels, (shape.batch_size,))
    elif kind.endswith("ForSemanticSegmentation"):
        sample["labels"] = torch.randint(config.num_labels, (shape.batch_size, height, width))
    elif _has_labels(model):
        raise ModelSourceError(
            f"{kind} takes labels, and what they are is not known here. {_OWN_SAMPLE}"
        )
    return sample


def _sound(model: Any, shape: SampleShape) -> Sample:
    config = model.config
    names = ("num_mel_bins", "max_source_positions")
    bins, positions = (getattr(config, name, None) for name in names)
    longest = getattr(config, "max_target_positions", None)
    if bins is None or positions is None or longest is None or not _has_labels(model):
        raise ModelSourceError(
            f"{type(model).__name__} takes sound in a form that is not known here. {_OWN_SAMPLE}"
        )
    length = shape.num_tokens or min(_DEFAULT_TOKENS, longest)
    return {
        # Two frames become one position.
        "input_features": torch.randn(shape.batch_size, bins, 2 * positions),
        "labels": _words(config, (shape.batch_size, length)),
    }
