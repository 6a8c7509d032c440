"""Marks of FSDP and of DistributedDataParallel, and the group's key-value store."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import distributed, nn

from rockmate._torch.storage import base_of


def default_store() -> distributed.Store:
    """The store that the process group was set up with. The public API has no getter."""
    return torch.distributed.distributed_c10d._get_default_store()


def first_offer(description: str, own: str) -> str:
    """What the first rank offered under a description; `own` without a process group.

    No rank waits for another. So ranks with different models, or ranks that come at different
    times, cannot block each other. A broadcast would: it is collective.
    """
    if (
        not (distributed.is_available() and distributed.is_initialized())
        or distributed.get_world_size() == 1
    ):
        return own
    key = f"rockmate/{hashlib.sha256(description.encode()).hexdigest()}"
    # The store takes no empty value as an offer.
    first = default_store().compare_set(key, "", f"={own}")
    text = first if isinstance(first, str) else bytes(first).decode()
    return text[1:]


def active_data_parallel() -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running; None outside of one.

    The wrapped module is not told who calls it.
    """
    return nn.parallel.DistributedDataParallel._active_ddp_module


def holds_sharded_parameters(module: nn.Module) -> bool:
    """Whether FSDP, of either generation, holds parameters that stand in this very module.

    FSDP's first generation puts views of its flat parameter in the places of parameters, as plain
    attributes. Neither generation marks a module publicly.
    """
    tensors = (
        *module._parameters.values(),
        *(value for value in vars(module).values() if isinstance(value, torch.Tensor)),
    )
    return hasattr(module, "_fsdp_wrapped_module") or any(map(_is_sharded, tensors))


def _is_sharded(tensor: Any) -> bool:
    return any(
        hasattr(each, "_fsdp_flattened") or hasattr(each, "device_mesh")
        for each in (tensor, base_of(tensor))
    )
