"""`torch.compile` with the min-cut partitioner at an activation memory budget.

The kernels are eager's (`min_cut`), or Inductor's (`inductor`). Every size is compiled by itself:
it runs faster than a size that is a variable, and Inductor fails on convolutional layers of
variable sizes.

Compiled callables are cached, since the first call of each costs some milliseconds that no step of
a training loop pays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config
from torch._inductor import list_mode_options
from torch.utils.checkpoint import checkpoint

from bench.models import Workload
from bench.peers.checkpoint import checkpoint_layers, replaced_forwards

# One process compiles many settings of one model. Past the limit Dynamo would silently run eager.
_COMPILATION = {
    "recompile_limit": 10_000,
    "accumulated_recompile_limit": 10_000,
    "fail_on_recompile_limit_hit": True,
}


def min_cut(budget: float, solver: str) -> Callable[..., Any]:
    """A backend: AOT eager with the min-cut partitioner at an `activation_memory_budget`.

    Args:
        budget: 1.0 saves what is fastest, 0.0 the inputs of the compiled module.
        solver: Of the knapsack: "dp", or "ilp", which needs scipy.
    """
    aot_eager = lookup_backend("aot_eager")

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with functorch_config.patch(
            activation_memory_budget=budget, activation_memory_budget_solver=solver
        ):
            return aot_eager(graph, inputs)

    return backend


def inductor(mode: str, budget: float) -> Callable[..., Any]:
    """A backend: Inductor in one of its modes, at an `activation_memory_budget`.

    Args:
        mode: "default", or "max-autotune-no-cudagraphs", which times several kernels for each
            matrix product. Modes with CUDA graphs hold memory of their own between steps.
        budget: as for `min_cut`.
    """
    patches = list_mode_options(mode)
    compile_with_inductor: Callable[..., Any] = lookup_backend("inductor")

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return compile_with_inductor(graph, inputs, config_patches=patches)

    return backend


@contextmanager
def compiled(
    workload: Workload, *, backend: Callable[..., Any], has_checkpoints: bool = False
) -> Iterator[Callable[..., Any]]:
    """The whole model compiled; the first call inside compiles, and later contexts use its code.

    Args:
        workload: the model.
        backend: of `torch.compile`.
        has_checkpoints: whether a checkpoint is around every layer.
    """
    around = checkpoint_layers(workload) if has_checkpoints else nullcontext()
    with around, dynamo_config.patch(**_COMPILATION):
        yield _compiled_model(workload, backend)


@contextmanager
def compiled_by_layer(
    workload: Workload, *, backend: Callable[..., Any], has_checkpoints: bool = False
) -> Iterator[nn.Module]:
    """Each layer compiled by itself, or a checkpoint around each; equal layers share the code."""
    forwards = _compiled_forwards(workload, backend)
    if has_checkpoints:
        around = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
        forwards = {
            layer: functools.partial(around, forward) for layer, forward in forwards.items()
        }
    with dynamo_config.patch(**_COMPILATION), replaced_forwards(forwards):
        yield workload.model


@functools.cache
def _compiled_model(workload: Workload, backend: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(workload.model, backend=backend, dynamic=False)


@functools.cache
def _compiled_forwards(
    workload: Workload, backend: Callable[..., Any]
) -> Mapping[nn.Module, Callable[..., Any]]:
    return {
        layer: torch.compile(layer.forward, backend=backend, dynamic=False)
        for layer in workload.layers(workload.model)
    }
