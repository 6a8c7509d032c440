"""Marks of FSDP and of DistributedDataParallel, and the group's key-value store."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed, nn

from rockmate._torch.dispatch import is_op
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
    first: Any = default_store().compare_set(key, "", f"={own}")
    text = first if isinstance(first, str) else bytes(first).decode()
    return text[1:]


def num_collectives() -> int:
    """How many this process has issued, in groups that count them: those of Gloo and NCCL."""
    number = 0
    if distributed.is_available() and distributed.is_initialized():
        groups: Any = torch.distributed.distributed_c10d._world.pg_map
        for group in groups:
            with contextlib.suppress(RuntimeError):
                number += group._get_sequence_number_for_group()
    return number


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
    is_second = any(hasattr(each, "device_mesh") for each in module._parameters.values())
    return is_second or is_gathered_by_fsdp1(module)


def is_gathered_by_fsdp1(module: nn.Module) -> bool:
    """Whether FSDP's first generation gathers parameters of this very module in its hooks."""
    tensors = (*module._parameters.values(), *vars(module).values())
    is_first = any(
        hasattr(each, "_fsdp_flattened")
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
        for each in (tensor, base_of(tensor))
    )
    return hasattr(module, "_fsdp_wrapped_module") or is_first


def is_collective(target: Any) -> bool:
    """Whether an op issues a functional collective, as `DTensor` does; the namespace is private."""
    return is_op(target) and target.namespace == "_c10d_functional" and not is_wait(target)


def is_wait(target: Any) -> bool:
    """Whether an op waits for the result of a functional collective."""
    return is_op(target) and str(target).startswith("_c10d_functional.wait_tensor")


def wait_for(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there."""
    return torch.ops._c10d_functional.wait_tensor.default(tensor)


def ranks_of(group_name: str) -> list[int]:
    """The global ranks of a process group, which ops know by its name alone."""
    return distributed.get_process_group_ranks(_group_named(group_name))


def _group_named(name: str) -> Any:
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
    return resolve(name)


def rank_in(group: str) -> int:
    """The rank of this process in a process group, by the group's name."""
    return _group_named(group).rank()


def start_gather(
    memory: torch.Tensor, part: torch.Tensor, num_ranks: int, group: str
) -> torch.Tensor:
    """Begins to gather the parts of all ranks, in their order; `part` may lie in its own place.

    Returns:
        What `wait_for` takes.
    """
    functional = torch.ops._c10d_functional
    return functional.all_gather_into_tensor_out(part, num_ranks, group, out=memory)


def start_reduction(
    memory: torch.Tensor, how: str, num_ranks: int, group: str
) -> Callable[[], torch.Tensor]:
    """Begins to sum ("sum") or average ("avg") a tensor over ranks.

    `memory` is overwritten. On a CPU, gloo reduces a copy of the whole tensor when it is asked to
    reduce and scatter. Here it reduces the tensor itself, in the same order.

    Returns:
        What waits, and gives this rank's part along dimension 0; that may be a view.
    """
    if memory.device.type == "cpu":
        running = start_all_reduce(memory, how, group)
        return lambda: wait_for(running).chunk(num_ranks)[rank_in(group)]
    functional = torch.ops._c10d_functional
    running = functional.reduce_scatter_tensor(memory, how, num_ranks, group)
    return lambda: wait_for(running)


def start_all_reduce(memory: torch.Tensor, how: str, group: str) -> torch.Tensor:
    """Begins to sum ("sum") or average ("avg") a tensor over ranks, in place.

    Returns:
        What `wait_for` takes.
    """
    return torch.ops._c10d_functional.all_reduce_(memory, how, group)


def free(memory: torch.Tensor) -> None:
    """Frees the memory of a tensor that nobody reads.

    A thread of gloo holds the tensors of a collective for a while after its end.
    """
    memory.untyped_storage().resize_(0)


@contextlib.contextmanager
def fake_group(num_ranks: int) -> Iterator[None]:
    """A default process group of so many ranks, of which this process is the first.

    Its collectives do nothing. PyTorch has it for its own tests only.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()
