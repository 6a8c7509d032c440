"""Ranks that are not there, to plan for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import distributed

from rockmate._torch.distributed import fake_group
from rockmate.errors import RockmateError


@contextlib.contextmanager
def simulated_ranks(num_ranks: int) -> Iterator[None]:
    """A process group of so many ranks in one process, to plan a sharded model for a cluster.

    Within it, shard a model on the meta device and make a `Planner` with `machine=`. Times of
    collectives follow from the number of ranks and the `[link]` of the machine's description.
    `Plan.predicted_ms` adds them to those of ops, and `Plan.overlapped_ms` lets them overlap.
    Nothing can be trained: collectives do nothing.

    Args:
        num_ranks: of the group.

    Raises:
        RockmateError: there is a process group already.
        ValueError: `num_ranks` is below 1.
    """
    if num_ranks < 1:
        msg = f"num_ranks is {num_ranks}; give 1 or more"
        raise ValueError(msg)
    if distributed.is_available() and distributed.is_initialized():
        msg = (
            "simulated_ranks makes a process group, and there is one of "
            f"{distributed.get_world_size()} ranks. Plan in a process of its own."
        )
        raise RockmateError(msg)
    with fake_group(num_ranks):
        yield
