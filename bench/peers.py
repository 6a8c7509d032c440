"""The other ways to train a workload that ours is measured against.

A peer lends a callable model for the duration of a context manager and puts everything back afterwards, so
all peers share one set of weights and any order of use is fair. A new peer is one function in `PEERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.models import Workload

Peer = Callable[[Workload], AbstractContextManager[nn.Module]]


@contextmanager
def eager(workload: Workload) -> Iterator[nn.Module]:
    """The model as it is: nothing recomputed."""
    yield workload.model


@contextmanager
def checkpoint_per_layer(workload: Workload) -> Iterator[nn.Module]:
    """One non-reentrant `torch.utils.checkpoint` around every layer.

    Gradients equal eager's, for the random state is restored for the second run. The buffers do not: a
    BatchNorm inside a layer updates its running statistics twice a step, as torch's checkpoint does.
    The backward must run inside the context too, since the second run calls what the context put there.
    """
    layers = workload.layers(workload.model)
    for layer in layers:
        # On the instance, where it shadows the class's method and `del` uncovers it again.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=True)
    try:
        yield workload.model
    finally:
        for layer in layers:
            del layer.forward


PEERS: dict[str, Peer] = {"eager": eager, "checkpoint": checkpoint_per_layer}
"""Name to peer."""
