"""The peers by name and setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from bench.models import Workload
from bench.peers.checkpoint import checkpoint_layers, checkpoint_per_layer, eager
from bench.peers.compiled import (
    compiled,
    compiled_by_layer,
    compiled_by_layer_with_checkpoints,
    compiled_with_checkpoints,
    inductor,
    min_cut,
)
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
_ALL: dict[str, Any] = {
    "every": (2, 3, 4),
    "min-cut": {"dp": _BUDGETS, "ilp": (0.5, 0.3, 0.1)},
    "min-cut by layer": {"dp": _BUDGETS, "ilp": (0.5, 0.3, 0.2, 0.1)},
    "inductor": (1.0, 0.8, 0.5, 0.2, 0.0),
    "modes": ("default", "max-autotune-no-cudagraphs"),
}
"""The settings of the families: one layer of how many is checkpointed, memory budgets by solver,
Inductor's budgets, and its modes. Modes but the first are measured at the largest budget alone."""
_QUICK: dict[str, Any] = {
    "every": (2,),
    "min-cut": {"dp": (0.5,)},
    "min-cut by layer": {"dp": (0.5,), "ilp": (0.5,)},
    "inductor": (1.0, 0.0),
    "modes": ("default",),
}


def peers_for(*, quick: bool = False) -> dict[str, Peer]:
    """Name to peer, eager first; `quick` takes fewer settings of each family."""
    settings = _QUICK if quick else _ALL
    save_ops = partial(create_selective_checkpoint_contexts, SAVED_OPS)
    default_partitioner = lookup_backend("aot_eager_default_partitioner")
    return {
        "eager": eager,
        "checkpoint": checkpoint_per_layer,
        **{
            f"checkpoint: every {k}": partial(checkpoint_layers, every=k) for k in settings["every"]
        },
        "sqrt(n) segments": checkpoint_segments,
        "checkpoint_sequential": checkpoint_in_sequence,
        "selective": partial(checkpoint_layers, context_fn=save_ops),
        "default partitioner": partial(compiled, backend=default_partitioner),
        **{
            f"{name}: {budget:g} {solver}": partial(lend, backend=min_cut(budget, solver))
            for name, lend in (("min-cut", compiled), ("min-cut by layer", compiled_by_layer))
            for solver, budgets in settings[name].items()
            for budget in budgets
        },
        **_inductors(settings["modes"], settings["inductor"]),
    }


def _inductors(modes: Sequence[str], budgets: Sequence[float]) -> dict[str, Peer]:
    """Inductor in each mode: whole and by layer, at each budget, and with checkpoints."""
    first, largest = modes[0], budgets[0]
    points = [*((first, budget) for budget in budgets), *((mode, largest) for mode in modes[1:])]
    plain = {"inductor": compiled, "inductor by layer": compiled_by_layer}
    checkpointed = {
        "inductor, checkpoints": compiled_with_checkpoints,
        "inductor by layer, checkpoints": compiled_by_layer_with_checkpoints,
    }
    return {
        **{
            f"{name}: {mode} {budget:g}": partial(lend, backend=inductor(mode, budget))
            for name, lend in plain.items()
            for mode, budget in points
        },
        **{
            f"{name}: {mode}": partial(lend, backend=inductor(mode, largest))
            for name, lend in checkpointed.items()
            for mode in modes
        },
    }


def family(name: str) -> str:
    """The part of a method's name before its setting."""
    return name.partition(":")[0]


PEERS: dict[str, Peer] = {"eager": eager, "checkpoint": checkpoint_per_layer}
"""The two that every model can be trained with."""
