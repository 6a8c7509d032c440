"""Checks of a model before it is captured, and of its calls: whether planned steps can run it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rockmate._torch.engine import active_transform, is_checkpointed
from rockmate._torch.fake import is_fake
from rockmate._torch.fsdp import modules_with_shards, put_shards
from rockmate.errors import InvalidSampleError, RockmateError, UnsupportedModelError

if TYPE_CHECKING:
    from rockmate.costs.machine import Machine

logger = logging.getLogger(__name__)


def is_lazy(model: nn.Module) -> bool:
    """Whether a tensor of a lazy module has no size yet."""
    return any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers())))


def refuse_uninitialized(model: nn.Module) -> None:
    """Raises for a model with lazy modules that have not run."""
    named = (*model.named_parameters(), *model.named_buffers())
    name = next((name for name, tensor in named if nn.parameter.is_lazy(tensor)), "")
    if name:
        msg = (
            f"{name} belongs to a lazy module, and has no size before the first call. Run the "
            "model once before it is planned for, or wrap it: the plain model then runs the first "
            "call."
        )
        raise InvalidSampleError(msg)


def refuse_resized(written: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Raises for a tensor that an op gives another size, which no trace shows."""
    if written.shape != value.shape:
        msg = (
            f"the forward resizes {name or 'an input'}, which a plan does not. Where the first "
            "call alone does, run the plain model once before it is wrapped."
        )
        raise UnsupportedModelError(msg)


def check_model(model: nn.Module, untraced: Sequence[str], machine: Machine | None) -> None:
    """Raises for a model that cannot be captured. Warns of hooks that will not run."""
    from rockmate.capture.model_signature import acting_hooks
    from rockmate.capture.opaque_module import opaque_modules
    from rockmate.runtime.ddp import refuse_sharded

    if not model.training:
        msg = (
            "the model is in eval mode, where a plan is never used. Call model.train() first; for "
            "gradients of inputs in eval mode (forces, saliency) write rockmate.plan_step(model, "
            "budget=...), which plans in either."
        )
        raise InvalidSampleError(msg)
    refuse_sharded(model)
    put_shards(model)
    sharded = set(modules_with_shards(model))
    if sharded:
        logger.info("the plan decides what is gathered again, whatever reshard_after_forward says")
    refuse_uninitialized(model)
    opaque = opaque_modules(model, untraced)
    for path, module in opaque.items():
        if not sharded.isdisjoint(module.modules()):
            msg = (
                f"the submodule {path} is not traced, and a plan runs it without the hooks in "
                "which fully_shard gathers parameters. Leave its parameters whole: "
                "fully_shard(..., ignored_params=...)."
            )
            raise UnsupportedModelError(msg)
    if machine is not None and opaque:
        msg = (
            f"the submodule {next(iter(opaque))} is not traced, so it has to run to be measured, "
            "and nothing runs when planning for a machine by its description. Plan on the machine "
            "itself."
        )
        raise UnsupportedModelError(msg)
    with_hooks = [path for path, module in model.named_modules() if path and acting_hooks(module)]
    if with_hooks:
        logger.warning(
            "hooks of submodules run when the model is captured and not in planned training steps: "
            "%s",
            ", ".join(with_hooks),
        )


def raise_as_eager(
    error: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raises what the plain model raises on a call that has failed, and leaves what it leaves.

    A call that it runs is undone. The plain model runs only if the first cause of the error may be
    the model's own: no class of the tracer's.
    """
    from rockmate.capture.read_values import UnknownValueError
    from rockmate.state.call_state import CallState
    from rockmate.state.tensors import tensors_in
    from rockmate.state.writes import Writes

    cause: BaseException | None = error
    while isinstance(cause, RockmateError) and not isinstance(cause, UnknownValueError):
        cause = cause.__cause__
    if cause is None or type(cause).__module__.startswith(("torch.", "rockmate.")):
        return
    before, writes = CallState(model, args, kwargs), Writes()
    if before.has_iterators() or any(map(is_fake, tensors_in((args, kwargs)))):
        return
    random = before.random_now()
    try:
        with writes.noted():
            model(*args, **kwargs)
    except torch.OutOfMemoryError:
        pass
    except Exception as own:
        raise own from None
    before.put_back(writes, random)


def refuse_surroundings() -> None:
    """Raises for a call within a function transform, such as `torch.func.grad`, or a checkpoint."""
    if is_checkpointed():
        msg = (
            "this training call runs inside of a checkpoint (torch.utils.checkpoint), which would "
            "run the whole planned step again. Call the module without a checkpoint around it, as "
            "the module chooses what is recomputed. Or checkpoint module.original, the plain model "
            "with the same parameters."
        )
        raise UnsupportedModelError(msg)
    transform = active_transform()
    if transform is not None:
        msg = (
            f"this training call runs inside of {transform}, which cannot see into a planned step. "
            "Transform module.original instead, the plain model with the same parameters."
        )
        raise UnsupportedModelError(msg)
