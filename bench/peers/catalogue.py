"""The peers by name and setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from bench.models import Workload
from bench.peers.checkpoint import checkpoint_layers, checkpoint_per_layer, eager, offloaded
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The settings of the families that have some.

    Attributes:
        every: Of `checkpoint`: one layer of so many is checkpointed.
        whole_dp: Memory budgets of `min-cut` with the dynamic program.
        whole_ilp: The same with the ILP.
        by_layer_dp: Memory budgets of `min-cut by layer` with the dynamic program.
        by_layer_ilp: The same with the ILP.
        inductor: Memory budgets of Inductor, whole and by layer.
        modes: Of Inductor. Modes but the first are measured at the largest budget alone.
    """

    every: tuple[int, ...]
    whole_dp: tuple[float, ...]
    whole_ilp: tuple[float, ...]
    by_layer_dp: tuple[float, ...]
    by_layer_ilp: tuple[float, ...]
    inductor: tuple[float, ...]
    modes: tuple[str, ...]


_BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
_ALL = _Settings(
    every=(2, 3, 4),
    whole_dp=_BUDGETS,
    whole_ilp=(0.5, 0.3, 0.1),
    by_layer_dp=_BUDGETS,
    by_layer_ilp=(0.5, 0.3, 0.2, 0.1),
    inductor=(1.0, 0.8, 0.5, 0.2, 0.0),
    modes=("default", "max-autotune-no-cudagraphs"),
)
_QUICK = _Settings(
    every=(2,),
    whole_dp=(0.5,),
    whole_ilp=(),
    by_layer_dp=(0.5,),
    by_layer_ilp=(0.5,),
    inductor=(1.0, 0.0),
    modes=("default",),
)


def peers_for(device: str = "cpu", *, quick: bool = False) -> dict[str, Peer | None]:
    """Name to peer, eager first; None if the peer cannot run on that kind of device.

    Args:
        device: "cpu" or "cuda".
        quick: Take fewer settings of each family.
    """
    settings = _QUICK if quick else _ALL
    save_ops = partial(create_selective_checkpoint_contexts, SAVED_OPS)
    default_partitioner = lookup_backend("aot_eager_default_partitioner")
    return {
        "eager": eager,
        "checkpoint": checkpoint_per_layer,
        **{f"checkpoint: every {k}": partial(checkpoint_layers, every=k) for k in settings.every},
        "sqrt(n) segments": checkpoint_segments,
        "checkpoint_sequential": checkpoint_in_sequence,
        "selective": partial(checkpoint_layers, context_fn=save_ops),
        "default partitioner": partial(compiled, backend=default_partitioner),
        **_min_cuts("min-cut", compiled, settings.whole_dp, settings.whole_ilp),
        **_min_cuts(
            "min-cut by layer", compiled_by_layer, settings.by_layer_dp, settings.by_layer_ilp
        ),
        **_inductors(settings),
        "offload": offloaded if device == "cuda" else None,
    }


def _min_cuts(
    name: str, compile_with: Callable[..., Any], dp: Sequence[float], ilp: Sequence[float]
) -> dict[str, Peer]:
    """The min-cut partitioner at each budget, first with one solver and then with the other."""
    settings = [*((budget, "dp") for budget in dp), *((budget, "ilp") for budget in ilp)]
    return {
        f"{name}: {budget:g} {solver}": partial(compile_with, backend=min_cut(budget, solver))
        for budget, solver in settings
    }


def _inductors(settings: _Settings) -> dict[str, Peer]:
    """Inductor in each mode: whole and by layer, at each budget, and with checkpoints."""
    first, *others = settings.modes
    largest = settings.inductor[0]
    points = [(first, budget) for budget in settings.inductor]
    points += [(mode, largest) for mode in others]
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
            for mode in settings.modes
        },
    }


def family(name: str) -> str:
    """The part of a method's name before its setting."""
    return name.partition(":")[0]


PEERS: dict[str, Peer] = {"eager": eager, "checkpoint": checkpoint_per_layer}
"""The two that every model can be trained with."""
