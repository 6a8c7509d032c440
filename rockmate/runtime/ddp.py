"""What DistributedDataParallel around a planned module asks of its backward.

Its reducer learns that a parameter's gradient is ready from a hook on the parameter's accumulation node. A planned backward fires that
hook when the gradient is final, for a few small parameters at a time, so buckets are reduced while it still runs. With
`find_unused_parameters=True` the reducer moreover walks the autograd graph from the outputs and takes every parameter that it does not
meet for unused. A planned step therefore has its parameters as inputs in that mode; their nodes then run, and their hooks fire, when
the whole step is done. Gradients are in `.grad` as early as otherwise, but nothing is reduced before the end.

FullyShardedDataParallel is refused: it gathers a layer's parameters in hooks around that layer, which a planned step does not run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed, nn

from rockmate._torch.distributed import active_data_parallel, holds_sharded_parameters
from rockmate._torch.members import accumulation_hooks_of, has_accumulation_hooks
from rockmate.errors import UnsupportedModelError
from rockmate.runtime.gradient_sink import GradientSink, nothing

SHARDED = (
    "FSDP shards this model's parameters and gathers them in hooks around its layers, which a planned step does not run. Use "
    "DistributedDataParallel(RockmateModule(model, ...)), or FSDP with the plain model."
)

REPLICATED = (
    "nn.DataParallel copies the module to each GPU in every step, and a plan belongs to one copy. Use "
    "one process for each GPU: start the script with torchrun and wrap the planned module in "
    "DistributedDataParallel, which Trainer does by itself."
)


def refuse_sharded(model: nn.Module) -> None:
    """Raises `UnsupportedModelError` if FSDP holds parameters of `model`, or DataParallel wraps it."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UnsupportedModelError(REPLICATED)
    if any(map(holds_sharded_parameters, model.modules())):
        raise UnsupportedModelError(SHARDED)


def is_distributed() -> bool:
    """Whether this process is one of a group, so that somebody may wait at a parameter's accumulation node to reduce its gradient."""
    return distributed.is_available() and distributed.is_initialized()


def finds_unused_parameters() -> bool:
    """Whether a DistributedDataParallel is calling its module that will look for unused parameters."""
    active = active_data_parallel()
    return active is not None and active.find_unused_parameters and not active.static_graph


class LastHooksSink(GradientSink):
    """Adds gradients to `.grad` and fires no hooks: the engine does that when the step is done."""

    fires_hooks = False

    def rests_of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """What the engine has to accumulate for each: a gradient that a tensor hook must see whole, or nothing at all."""
        if not self._waiting and not any(map(accumulation_hooks_of, parameters)):
            return [None] * len(parameters)
        return list(map(self._rest_of, parameters))

    def _rest_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        # Accumulation hooks fire with a gradient only.
        if has_accumulation_hooks(parameter) and id(parameter) not in self._waiting:
            return nothing(parameter.shape, parameter.dtype, parameter.device)
        return self._waiting.pop(id(parameter), None)
