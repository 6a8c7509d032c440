"""What a capture changes in Hugging Face models: mask code, the key/value cache, checkpointing."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from rockmate._util import attributes_set

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def known_masks(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, are_read: bool = False
) -> Iterator[None]:
    """Answers questions of Hugging Face's mask code that it answers by reading tensor values.

    Without `position_ids` there is no packing. Without a mask nothing is padded, while older
    versions make a mask of their own wherever they are traced. A mask that is given is never
    skipped: its values differ from batch to batch, and a traced mask stays unknown. Where masks
    `are_read`, as in eager, one without padding is skipped, and one with it has a graph of its own.
    """
    masking = sys.modules.get("transformers.masking_utils")
    # Further positional arguments may be masks or positions.
    if masking is None or len(args) > 1:
        yield
        return
    is_tracing = masking.is_tracing
    answers: dict[str, Callable[..., Any]] = {
        "is_torchdynamo_exporting": lambda: False,
        "is_tracing": lambda tensor=None: not (are_read or tensor is None) and is_tracing(tensor),
    }
    if kwargs.get("position_ids") is None:
        answers["find_packed_sequence_indices"] = lambda position_ids: None
    known = [(masking, name, answers[name]) for name in answers if hasattr(masking, name)]
    with attributes_set(*known):
        yield


@contextlib.contextmanager
def training_only_features_off(
    model: nn.Module, *, keeps_checkpoints: bool = False, is_told: bool = False
) -> Iterator[None]:
    """Switches off the key/value cache and gradient checkpointing.

    A training step has no use for the cache; the plan replaces checkpointing, unless its calls are
    to be recorded (`keeps_checkpoints`). One line in the log tells of the cache, if `is_told`.
    """
    names = {"use_cache"} if keeps_checkpoints else {"use_cache", "gradient_checkpointing"}
    found = {(id(owner), name): (owner, name) for owner, name in switches_of(model)}
    switches = [
        (owner, name, False)
        for owner, name in found.values()  # modules share configs
        if name in names and getattr(owner, name) is True
    ]
    if is_told and any(name == "use_cache" for _, name, _ in switches):
        logger.info(
            "use_cache is off in the planned forward: a training step does not use past_key_values"
        )
    with attributes_set(*switches):
        yield


def switches_of(model: nn.Module) -> list[tuple[Any, str]]:
    """Owners and names of what a capture switches off, whether on or not."""
    modules = list(model.modules())
    switches = [(each, "gradient_checkpointing") for each in modules]
    for config in (getattr(each, "config", None) for each in modules):
        within = (getattr(config, name, None) for name in ("text_config", "decoder"))
        switches += [(holder, "use_cache") for holder in (config, *within)]
    return [(owner, name) for owner, name in switches if hasattr(owner, name)]


def is_cache(value: Any) -> bool:
    """Whether an argument is the key/value cache of a model, which its layers change."""
    return any(each.__module__ == "transformers.cache_utils" for each in type(value).__mro__)


def is_recording() -> bool:
    """Whether hooks of a Hugging Face model that is being called record what submodules return."""
    recorders = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(recorders, "_active_collector", None)
    return collector is not None and bool(collector.get())


def is_switched_off(owner: Any, name: str) -> bool:
    """Whether an attribute is a switch that is off in every captured forward."""
    return name == ("gradient_checkpointing" if isinstance(owner, nn.Module) else "use_cache")


def modules_with_checkpointing(model: nn.Module) -> list[nn.Module]:
    """The submodules in which Hugging Face's gradient checkpointing is switched on."""
    return [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", None) is True
    ]
