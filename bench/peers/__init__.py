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

from bench.peers.catalogue import PEERS, SAVED_OPS, STAGES, Peer, family, peers_for
from bench.peers.checkpoint import (
    checkpoint_layers,
    checkpoint_per_layer,
    checkpoint_stages,
    eager,
)
from bench.peers.compiled import compiled, compiled_by_layer, inductor, min_cut
from bench.peers.segments import checkpoint_in_sequence, checkpoint_segments

__all__ = [
    "PEERS",
    "SAVED_OPS",
    "STAGES",
    "Peer",
    "checkpoint_in_sequence",
    "checkpoint_layers",
    "checkpoint_per_layer",
    "checkpoint_segments",
    "checkpoint_stages",
    "compiled",
    "compiled_by_layer",
    "eager",
    "family",
    "inductor",
    "min_cut",
    "peers_for",
]
