"""Data-parallel training around a planned module: what is supported, what is refused.

DistributedDataParallel learns from the accumulation node of a parameter that its gradient is ready.
A planned backward has these nodes visited as gradients become final, a few small parameters at a
time. So buckets are reduced while the backward still runs.

With `find_unused_parameters=True` DistributedDataParallel also walks the autograd graph from the
outputs, and takes each parameter that it does not meet for unused. In that mode a planned step has
its parameters as inputs. Their nodes are visited, and hooks fire, when the whole step is done.
Gradients are in `.grad` as early as otherwise, but nothing is reduced before the end.

FSDP is refused: it gathers a layer's parameters in hooks around that layer, which a planned step
does not run. `rockmate.fully_shard` gathers them in ops of the forward. `nn.DataParallel` is
refused: it copies the module in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import distributed, nn

from rockmate._torch.distributed import active_data_parallel, is_gathered_by_fsdp
from rockmate._torch.members import accumulation_hooks_of, has_accumulation_hooks
from rockmate.capture.wrapping import Wrapping
from rockmate.errors import UnsupportedModelError
from rockmate.ops.held_gradients import HeldGradients
from rockmate.runtime.gradient_sink import GradientSink, empty_gradient
from rockmate.sharding.mark import sharded_model_of

SHARDED = (
    "FSDP shards this model's parameters and gathers them in hooks around its layers, which a "
    "planned step does not run. Shard the plain model with rockmate.fully_shard(model, mesh) in "
    "place of FSDP, or use DistributedDataParallel(RockmateModule(model, ...))."
)

REPLICATED = (
    "nn.DataParallel copies the module to each GPU in every step, and a plan belongs to one copy. "
    "Use one process for each GPU: start the script with torchrun and wrap the planned module in "
    "DistributedDataParallel, which Trainer does by itself."
)


def refuse_sharded(model: nn.Module) -> None:
    """Raises `UnsupportedModelError` for a model inside FSDP or `nn.DataParallel`."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UnsupportedModelError(REPLICATED)
    if any(map(is_gathered_by_fsdp, model.modules())):
        raise UnsupportedModelError(SHARDED)
    _refuse_mixed(model)


def _refuse_mixed(model: nn.Module) -> None:
    """Raises if a model has sharded parameters and plain ones, whose gradients nobody reduces."""
    shared = next(filter(None, map(sharded_model_of, model.modules())), None)
    if shared is None:
        return
    for name, parameter in model.named_parameters():
        is_plain = parameter.requires_grad and not hasattr(parameter, "device_mesh")
        if is_plain and not any(parameter is each for each in shared.ignored):
            msg = (
                f"{name} is a plain parameter in a model that fully_shard has sharded in part, so "
                "each rank would train it by its own gradient. Call rockmate.fully_shard once, "
                "with the whole model and its adapters, or name it there: ignored=[...]."
            )
            raise UnsupportedModelError(msg)


def is_distributed() -> bool:
    """Whether this process is one of a group, whose members may reduce gradients at any time."""
    return distributed.is_available() and distributed.is_initialized()


def finds_unused_parameters() -> bool:
    """Whether a DistributedDataParallel that will look for unused parameters calls its module."""
    active = active_data_parallel()
    return active is not None and active.find_unused_parameters and not active.static_graph


class LastHooksSink(GradientSink):
    """Accumulates gradients and fires no hooks: the engine does that when the step is done."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        wrappings: Mapping[str, Wrapping],
        held: HeldGradients | None,
    ) -> None:
        """See `GradientSink`."""
        super().__init__(parameters, fires_hooks=False, wrappings=wrappings, held=held)

    def remaining_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient that the engine has to accumulate for each parameter.

        It is the whole gradient for a tensor hook, an empty one for accumulation hooks, which fire
        with a gradient only, and None otherwise. A parameter without a gradient has none to fire.
        """
        if not self._hooked and not any(map(accumulation_hooks_of, parameters)):
            return [None] * len(parameters)
        return list(map(self._remaining_gradient, parameters))

    def _remaining_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if id(parameter) not in self._used:
            return None
        if has_accumulation_hooks(parameter) and id(parameter) not in self._hooked:
            return empty_gradient(parameter.shape, parameter.dtype, parameter.device)
        return self._hooked.pop(id(parameter), None)
