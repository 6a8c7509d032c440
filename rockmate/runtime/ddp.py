"""Data-parallel training around a planned module: what is supported, what is refused.

DistributedDataParallel learns from the accumulation node of a parameter that its gradient is ready.
A planned backward has these nodes visited as gradients become final, a few small parameters at a
time. So buckets are reduced while the backward still runs.

With `find_unused_parameters=True` DistributedDataParallel also walks the autograd graph from the
outputs, and takes each parameter that it does not meet for unused. In that mode a planned step has
its parameters as inputs. Their nodes are visited, and hooks fire, when the whole step is done.
Gradients are in `.grad` as early as otherwise, but nothing is reduced before the end.

FSDP's first generation is refused: its parameters are views of a flat one. What
`torch.distributed.fsdp.fully_shard` has sharded is gathered by ops of the forward
(`ops.gathering`). `nn.DataParallel` is refused: it copies the module in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed, nn

from rockmate._torch.distributed import active_data_parallel, is_gathered_by_fsdp1
from rockmate._torch.fsdp import sharded_groups, unplanned_setting
from rockmate._torch.members import has_accumulation_hooks
from rockmate.errors import UnsupportedModelError
from rockmate.runtime.gradient_sink import GradientSink, empty_gradient

SHARDED = (
    "FullyShardedDataParallel (FSDP1) keeps parameters in one flat tensor, which neither plans nor "
    "frames follow. Shard the plain model with torch.distributed.fsdp.fully_shard, then "
    "wrap it in RockmateModule, or use DistributedDataParallel(RockmateModule(model, ...))."
)

REPLICATED = (
    "nn.DataParallel copies the module to each GPU in every step, and a plan belongs to one copy. "
    "Use one process for each GPU: start the script with torchrun and wrap the planned module in "
    "DistributedDataParallel, which Trainer does by itself."
)


AROUND = (
    "DistributedDataParallel stands within the planned module, and no plan does what it does. Put "
    "it around: DistributedDataParallel(RockmateModule(model, ...))."
)


def refuse_sharded(model: nn.Module) -> None:
    """Raises `UnsupportedModelError` for a model whose parallelism no plan follows."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise UnsupportedModelError(AROUND)
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UnsupportedModelError(REPLICATED)
    refuse_flat_parameters(model)
    try:
        found = unplanned_setting(sharded_groups(model))
    except NotImplementedError as error:
        found = str(error)
    if found:
        msg = f"the model is sharded with {found}, which a plan does not follow. Leave that out."
        raise UnsupportedModelError(msg)


def refuse_flat_parameters(model: nn.Module) -> None:
    """Raises `UnsupportedModelError` for a model that FSDP1 has sharded."""
    if any(map(is_gathered_by_fsdp1, model.modules())):
        raise UnsupportedModelError(SHARDED)


def is_distributed() -> bool:
    """Whether this process is one of a group, whose members may reduce gradients at any time."""
    return distributed.is_available() and distributed.is_initialized()


def finds_unused_parameters() -> bool:
    """Whether a DistributedDataParallel that will look for unused parameters calls its module."""
    active = active_data_parallel()
    return active is not None and active.find_unused_parameters and not active.static_graph


class LastHooksSink(GradientSink):
    """Accumulates gradients and fires no hooks: the engine does that when the step is done."""

    def remaining_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient that the engine has to accumulate for each parameter.

        It is the whole gradient for a tensor hook, an empty one for accumulation hooks, which fire
        with a gradient only, and None otherwise. A parameter without a gradient has none to fire.
        """
        return list(map(self._remaining_gradient, parameters))

    def _remaining_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if id(parameter) not in self._used:
            return None
        if has_accumulation_hooks(parameter) and id(parameter) not in self._hooked:
            return empty_gradient(parameter.shape, parameter.dtype, parameter.device)
        return self._hooked.pop(id(parameter), None)
