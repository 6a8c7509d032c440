"""The other ways to train a workload in less memory, each used as its documentation says.

A peer lends a callable model for the duration of a context manager and restores everything
afterwards. So all peers share one set of weights, and they can be used in any order and any number
of times. Forward and backward both run inside the context. In the name of a method, the part before
a colon is the family and the rest its setting. A further peer is one entry of `peers_for`.

====================== =============================================================================
family                 what it does
====================== =============================================================================
eager                  nothing: the model as it is
checkpoint             `torch.utils.checkpoint`, non-reentrant, around every k-th layer, by
                       `activation_checkpointing_enable` where the model has that; "stages" are
                       larger modules of the models that have some
sqrt(n) segments       one checkpoint around each of sqrt(n) runs of layers (Chen et al., 2016)
checkpoint_sequential  `torch.utils.checkpoint.checkpoint_sequential` with sqrt(n) segments, the
                       last of which saves everything
selective              a checkpoint around every layer that saves the results of matrix products,
                       attention and convolutions
default partitioner    `torch.compile`, AOT eager backend: it saves every intermediate value that
                       the backward reads
min-cut                `torch.compile`, AOT eager backend with the min-cut partitioner, at an
                       `activation_memory_budget` and with the named knapsack solver
min-cut by layer       the same with each layer compiled by itself (regional compilation)
inductor               `torch.compile` with Inductor, in the named mode, at an
                       `activation_memory_budget`
inductor by layer      the same with each layer compiled by itself
..., checkpoints       the same with a checkpoint around every layer, or compiled layer
====================== =============================================================================

The AOT eager backend runs the same kernels as eager. So the comparison is about which values are
saved and recomputed, not about fusion. Where the min-cut partitioner recomputes dropout, this
backend draws other random numbers, and its gradients differ from eager's. The comparison shows
that, and no setting avoids it.

Inductor's kernels are fused, and its gradients differ from eager's by rounding; its dropout draws
other numbers. It needs a C++ compiler, and takes long to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from bench.models import Workload
from bench.peers.checkpoint import checkpoint_layers, eager
from bench.peers.checkpoint import checkpoint_stages as checkpoint_stages
from bench.peers.compiled import compiled, compiled_by_layer, inductor, min_cut
from bench.peers.segments import checkpoint_in_sequence, checkpoint_segments

Peer = Callable[[Workload], AbstractContextManager[Callable[..., Any]]]
_aten = torch.ops.aten

SAVED_OPS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""The ops whose results selective checkpointing saves: those that take long to compute.

The list follows PyTorch's description of the technique.
"""

STAGES = "checkpoint: stages"
"""Name of the peer that only models with stages have."""

_BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
_MIN_CUT: dict[str, dict[str, Sequence[float]]] = {
    "min-cut": {"dp": _BUDGETS, "ilp": (0.5, 0.3, 0.1)},
    "min-cut by layer": {"dp": _BUDGETS, "ilp": (0.5, 0.3, 0.2, 0.1)},
}
"""Family -> memory budgets by solver."""
_INDUCTOR_BUDGETS = (1.0, 0.8, 0.5, 0.2, 0.0)
_INDUCTOR_MODES = ("default", "max-autotune-no-cudagraphs")
"""Modes but the first are measured at the largest budget alone."""


def peers_for() -> dict[str, Peer]:
    """Name to peer, eager first."""
    save_ops = partial(create_selective_checkpoint_contexts, SAVED_OPS)
    default_partitioner = lookup_backend("aot_eager_default_partitioner")
    return {
        "eager": eager,
        "checkpoint": checkpoint_layers,
        **{f"checkpoint: every {k}": partial(checkpoint_layers, every=k) for k in (2, 3, 4)},
        "sqrt(n) segments": checkpoint_segments,
        "checkpoint_sequential": checkpoint_in_sequence,
        "selective": partial(checkpoint_layers, context_fn=save_ops),
        "default partitioner": partial(compiled, backend=default_partitioner),
        **{
            f"{name}: {budget:g} {solver}": partial(lend, backend=min_cut(budget, solver))
            for name, lend in (("min-cut", compiled), ("min-cut by layer", compiled_by_layer))
            for solver, budgets in _MIN_CUT[name].items()
            for budget in budgets
        },
        **_inductors(),
    }


def _inductors() -> dict[str, Peer]:
    """Inductor in each mode: whole and by layer, at each budget, and with checkpoints."""
    first, *others = _INDUCTOR_MODES
    points = [(first, budget) for budget in _INDUCTOR_BUDGETS] + [(mode, 1.0) for mode in others]
    lenders = {"inductor": compiled, "inductor by layer": compiled_by_layer}
    return {
        **{
            f"{name}: {mode} {budget:g}": partial(lend, backend=inductor(mode, budget))
            for name, lend in lenders.items()
            for mode, budget in points
        },
        **{
            f"{name}, checkpoints: {mode}": partial(
                lend, backend=inductor(mode, 1.0), has_checkpoints=True
            )
            for name, lend in lenders.items()
            for mode in _INDUCTOR_MODES
        },
    }


def family(name: str) -> str:
    """The part of a method's name before its setting."""
    return name.partition(":")[0]
